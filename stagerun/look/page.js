// The page's script: it puts in the sections that the server has rendered, chooses stages and sorts tables. It makes no markup of data:
// what it writes itself is text.
"use strict";
(function () {
  const byId = id => document.getElementById(id), detail = byId("detail"), shown = detail.querySelector("div");
  const live = document.querySelector("script[data-live]") !== null;
  const sorted = new Map(); // by the id of a table: column, and whether it falls
  const sections = new Map(); // by id: the HTML that the server sent last
  let chosen = "", before = null, content = "", turn = 0;

  // -- sections, as the server sends them

  function put(id, html) {
    if (sections.get(id) === html) return;
    sections.set(id, html);
    const place = byId(id), held = place.contains(document.activeElement) ? document.activeElement : null;
    const heading = held && held.closest("th"), column = heading && held.tagName === "BUTTON" && [heading.closest("table").id, heading.cellIndex];
    const stage = held && held.dataset.stage, open = new Map([...place.querySelectorAll("details[id]")].map(d => [d.id, d.open]));
    const scrolls = new Map([...place.querySelectorAll("table")].map(t => [t.id, t.parentNode.scrollTop]));
    const left = place.querySelector(".frame")?.scrollLeft;
    place.innerHTML = html;
    place.hidden = html === "";
    for (const [name, is] of open) if (byId(name)) byId(name).open = is;
    for (const [name, top] of scrolls) if (byId(name)) byId(name).parentNode.scrollTop = top;
    if (left && place.querySelector(".frame")) place.querySelector(".frame").scrollLeft = left;
    finish(place);
    if (column) byId(column[0])?.tHead.rows[0].cells[column[1]]?.querySelector("button")?.focus({preventScroll: true});
    if (stage) [...place.querySelectorAll("[data-stage]")].find(e => e.dataset.stage === stage)?.focus({preventScroll: true});
  }

  // Names of stages become links, tables are sorted as before, and the chosen stage is marked.
  function finish(place) {
    const stages = new Set([...document.querySelectorAll("#chart .stage")].map(e => e.dataset.stage));
    for (const cell of place.querySelectorAll("td.text")) {
      const name = cell.textContent;
      if (!stages.has(name)) continue;
      const link = document.createElement("a");
      link.href = "#stage=" + encodeURIComponent(name);
      link.dataset.stage = link.textContent = name;
      cell.replaceChildren(link);
    }
    place.querySelectorAll("table").forEach(resort);
    mark();
  }

  // Asks for sections twice a second, while the page is seen.
  async function follow(version) {
    if (!document.hidden) {
      const answer = await fetch("sections/" + version + ".json").catch(() => null);
      byId("lost").hidden = answer !== null && answer.ok;
      if (answer && answer.ok) {
        const [now, all] = await answer.json();
        version = now;
        for (const [id, html] of Object.entries(all)) put(id, html);
        if (chosen && Object.keys(all).length) choose(chosen, true);
      }
    }
    setTimeout(() => follow(version), 500);
  }

  // -- a stage

  function mark() {
    for (const one of document.querySelectorAll("#chart [data-of]")) one.classList.toggle("picked", one.dataset.of === chosen);
    for (const one of document.querySelectorAll("main [data-stage]")) {
      const is = one.dataset.stage === chosen;
      if (one.tagName === "g") one.classList.toggle("picked", is);
      else if (is) one.setAttribute("aria-current", "true"); else one.removeAttribute("aria-current");
      one.closest("tr")?.classList.toggle("chosen", is);
    }
  }

  async function choose(name, again) {
    const kept = [...document.querySelectorAll("[data-detail]")].find(e => e.dataset.detail === name);
    const now = ++turn;
    let html = kept ? kept.innerHTML : "";
    if (!kept && live) {
      const answer = await fetch("stage/" + encodeURIComponent(name)).catch(() => null);
      html = answer && answer.ok ? await answer.text() : "";
      if (now !== turn) return; // meanwhile another was chosen, or none
      if (!html) { if (!again) close(); return; }
    } else if (!kept) return;
    if (!again) before = document.activeElement;
    chosen = name;
    const folded = [...shown.querySelectorAll("details")].map(d => d.open), top = detail.scrollTop;
    if (!again || html !== content) shown.innerHTML = content = html;
    else { mark(); return; }
    detail.hidden = false;
    mark();
    if (again) { shown.querySelectorAll("details").forEach((d, n) => { d.open = folded[n]; }); detail.scrollTop = top; }
    else detail.focus();
  }

  function close() {
    turn += 1;
    if (detail.hidden) return;
    detail.hidden = true;
    chosen = "";
    if (location.hash.startsWith("#stage=")) history.replaceState(null, "", location.pathname + location.search);
    mark();
    if (before && before.isConnected) before.focus();
  }

  function hash() {
    const match = /^#stage=(.+)$/.exec(location.hash);
    if (match) choose(decodeURIComponent(match[1]), false); else close();
  }

  function activate(stage) {
    const wanted = "#stage=" + encodeURIComponent(stage);
    if (location.hash === wanted) hash(); else location.hash = wanted;
  }

  document.addEventListener("click", event => {
    const on = event.target.closest("[data-stage]"), head = event.target.closest("th button");
    if (on) { event.preventDefault(); on.focus?.(); activate(on.dataset.stage); }
    else if (head) sort(head);
    else if (event.target.id === "close") close();
  });
  document.addEventListener("keydown", event => {
    const on = document.activeElement;
    if (event.key === "Escape") close();
    else if ((event.key === "Enter" || event.key === " ") && on.tagName === "g" && on.dataset.stage) { event.preventDefault(); activate(on.dataset.stage); }
  });

  // -- tables

  function sort(button) {
    const table = button.closest("table"), column = [...button.closest("tr").children].indexOf(button.closest("th"));
    const last = sorted.get(table.id), falls = last && last.column === column ? !last.falls : button.closest("th").className === "number";
    sorted.set(table.id, {column, falls});
    resort(table);
  }

  const UNITS = {min: 60, h: 3600, d: 86400, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12};

  // `1 h 07 min` is 4020; a text or a moment stays as it is.
  function key(cell) {
    const text = cell.textContent;
    if (cell.className !== "number" || text === "" || /^\d+-/.test(text)) return text;
    return [...text.matchAll(/([-+]?[\d.]+)\s*([a-zA-Z]*)/g)].reduce((sum, [, number, unit]) => sum + Number(number) * (UNITS[unit] || 1), 0);
  }

  function compare(a, b) {
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, {numeric: true});
  }

  function resort(table) {
    const how = sorted.get(table.id);
    if (!how) return;
    [...table.tHead.rows[0].cells].forEach((head, n) => {
      if (n === how.column) head.setAttribute("aria-sort", how.falls ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
    });
    const rows = [...table.tBodies[0].rows].map(row => [key(row.cells[how.column]), row]);
    // Rows without a value stay at the end.
    rows.sort(([a], [b]) => (a === "") - (b === "") || (how.falls ? compare(b, a) : compare(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  // -- runs: a row of a table brings out the lines of those that it names

  function bringOut(event) {
    const row = event.target.closest("#ranking tr, #report tr");
    const named = new Set(row ? [...row.cells].flatMap(cell => [cell.textContent, ...cell.textContent.split(", ")]) : []);
    for (const line of document.querySelectorAll("#chart path[data-run]")) {
      const is = named.has(line.dataset.run);
      if (is && !line.classList.contains("picked")) line.parentNode.append(line); // on top of the others
      line.classList.toggle("picked", is);
    }
  }

  document.addEventListener("pointerover", bringOut);
  document.addEventListener("focusin", bringOut);

  // -- what the pointer is on: numbers of the chart, as text

  const tip = {data: null, of: null};

  function data() {
    const svg = byId("chart");
    if (svg && tip.of !== svg) { tip.of = svg; tip.data = JSON.parse(svg.dataset.values); }
    return svg && tip.data;
  }

  // The index of the last iteration that is not after `iter`.
  function last(iters, iter) {
    let low = 0, high = iters.length;
    while (low < high) { const middle = (low + high) >> 1; if (iters[middle] <= iter) low = middle + 1; else high = middle; }
    return Math.max(0, low - 1);
  }

  function rateAt([iters, rates], iter) {
    const n = last(iters, iter);
    if (n + 1 >= iters.length) return rates[n];
    return Number((rates[n] + (rates[n + 1] - rates[n]) * (iter - iters[n]) / (iters[n + 1] - iters[n])).toPrecision(6));
  }

  const valueAt = ([iters, values], iter) => values.length ? values[last(iters, iter)] : null;

  const height = ([, top, bottom, low, high], value) => bottom - (value - low) / (high - low) * (bottom - top);

  // What is nearest: a stage, or a stage of a run, at an iteration of it.
  function nearest(all, at, hovered) {
    const panel = all.panels.find(([, top, bottom]) => at.y >= top - 10 && at.y < bottom + 10);
    let best = null;
    const offer = (stage, run, iter, far, y) => { if (!best || far < best.far) best = {stage, run, iter, far, y}; };
    for (const stage of all.stages) {
      const [begin, end] = stage.x, outside = Math.max(begin - at.x, at.x - end, 0);
      if (outside > 4) continue;
      const iter = Math.round(Math.min(1, Math.max(0, (at.x - begin) / (end - begin || 1))) * stage.n);
      if (hovered ? hovered === stage.name : at.y > all.foot) offer(stage, null, iter, outside + stage.lane, null);
      else if (!hovered && (!panel || panel === all.panels[0])) {
        const y = height(all.panels[0], rateAt(stage.lr, iter));
        offer(stage, null, iter, Math.abs(y - at.y), y);
      } else if (!hovered) for (const run of all.runs.filter(run => run.stage === stage.name)) {
        const course = panel[0].startsWith("loss") ? run.loss : [run.tests.map(t => t[0]), run.tests.map(t => t[1])];
        if (!course[0].length || iter > course[0][course[0].length - 1] + stage.n / 50) continue;
        const y = height(panel, valueAt(course, iter));
        offer(stage, run, iter, Math.abs(y - at.y), y);
      }
    }
    return best;
  }

  function tell(all, {stage, run, iter, y}, event) {
    const values = byId("values"), frame = values.parentNode;
    // A single run, whose label is empty, is shown with the rate, too.
    const past = run || all.runs.find(one => one.label === "" && one.stage === stage.name) || null;
    const tests = past ? past.tests.filter(t => t[0] <= iter && t[2] === 0) : [];
    const reached = past && past.loss[0].length && iter <= past.loss[0][past.loss[0].length - 1] + stage.n / 50;
    const test = tests.length ? tests[tests.length - 1] : null;
    const at = stage.at[0] + iter * stage.at[1], settings = Object.entries(stage.settings).map(([name, pairs]) => [name, valueAt(pairs, iter)]);
    const rows = [["iteration", iter + " of " + stage.n], ["epoch", at.toFixed(3)],
      ["learning rate", rateAt(stage.lr, iter)], ["loss", reached ? valueAt(past.loss, iter) : null],
      ["top-1", reached && test ? test[1] + " % at " + test[0] : null], ...settings];
    const table = document.createElement("table"), title = document.createElement("b");
    title.textContent = [past && past.label, stage.name].filter(Boolean).join(": ") + (stage.note ? ", " + stage.note : "");
    for (const [name, value] of rows) {
      if (value === null) continue;
      const line = table.insertRow();
      line.insertCell().textContent = name;
      line.insertCell().textContent = String(value);
    }
    values.replaceChildren(title, table);
    values.style.display = "block";
    const box = frame.getBoundingClientRect(), x = event.clientX - box.left + frame.scrollLeft, wide = values.offsetWidth;
    values.style.left = Math.max(0, x + 16 + wide > frame.clientWidth + frame.scrollLeft ? x - 16 - wide : x + 16) + "px";
    values.style.top = Math.max(0, Math.min(event.clientY - box.top + 12, frame.clientHeight - values.offsetHeight)) + "px";
    dot(stage, iter, y);
  }

  function dot(stage, iter, y) {
    const svg = byId("chart");
    let one = svg.querySelector("#dot");
    if (!one) { one = svg.appendChild(document.createElementNS(svg.namespaceURI, "circle")); one.id = "dot"; one.setAttribute("r", 3.5); }
    one.style.display = y === null ? "none" : "";
    one.setAttribute("class", "dot " + stage.colour);
    one.setAttribute("cx", stage.x[0] + (stage.x[1] - stage.x[0]) * iter / stage.n);
    if (y !== null) one.setAttribute("cy", y);
  }

  function hide() {
    const values = byId("values"), one = byId("dot");
    if (values) values.style.display = "none";
    if (one) one.style.display = "none";
  }

  document.addEventListener("pointermove", event => {
    const svg = event.target.closest("#chart"), all = svg && data();
    if (!all) { hide(); return; }
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const stage = event.target.closest(".stage");
    const target = at.y < all.panels[0][1] ? null : nearest(all, at, stage && stage.dataset.stage);
    if (target) tell(all, target, event); else hide();
  });

  window.addEventListener("hashchange", hash);
  finish(document);
  if (live) follow("none");
  hash();
})();
