// The page's script: it puts in the sections that the server has rendered, chooses stages and sorts tables. It makes no markup of data:
// what it writes itself is text.
"use strict";
(function () {
  const detail = document.getElementById("detail"), shown = detail.querySelector("div"), byId = id => document.getElementById(id);
  const sorted = new Map(); // by the id of a table: column, and whether it falls
  let chosen = "", before = null, told = "", asked = 0;

  // -- sections, as the server sends them

  function put(id, html) {
    const place = byId(id), held = place.contains(document.activeElement) ? document.activeElement : null;
    const heading = held && held.closest("th"), column = heading && held.tagName === "BUTTON" && [heading.closest("table").id, heading.cellIndex];
    const stage = held && held.dataset.stage, open = new Map([...place.querySelectorAll("details[id]")].map(d => [d.id, d.open]));
    const scrolls = new Map([...place.querySelectorAll("table")].map(t => [t.id, t.parentNode.scrollTop]));
    place.innerHTML = html;
    place.hidden = html === "";
    for (const [name, is] of open) if (byId(name)) byId(name).open = is;
    for (const [name, top] of scrolls) if (byId(name)) byId(name).parentNode.scrollTop = top;
    place.querySelectorAll("table").forEach(resort);
    mark();
    if (column) byId(column[0])?.tHead.rows[0].cells[column[1]]?.querySelector("button")?.focus({preventScroll: true});
    if (stage) [...place.querySelectorAll("[data-stage]")].find(e => e.dataset.stage === stage)?.focus({preventScroll: true});
  }

  function listen() {
    let source = null, version = document.body.dataset.version;
    const stop = () => { if (source) source.close(); source = null; };
    const start = () => {
      if (source) return;
      source = new EventSource("events?since=" + encodeURIComponent(version));
      source.addEventListener("sections", event => {
        for (const [id, html] of Object.entries(JSON.parse(event.data))) put(id, html);
        version = event.lastEventId;
        if (chosen) choose(chosen, true);
      });
      source.onopen = () => { byId("lost").hidden = true; };
      source.onerror = () => {
        byId("lost").hidden = false;
        if (source.readyState === EventSource.CLOSED) { stop(); setTimeout(start, 5000); }
      };
    };
    // A page that no one sees asks for nothing.
    document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else start(); });
    start();
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
    const turn = ++asked;
    let html = kept ? kept.innerHTML : "";
    if (!kept && document.body.dataset.version) {
      const answer = await fetch("stage/" + encodeURIComponent(name)).catch(() => null);
      html = answer && answer.ok ? await answer.text() : "";
      if (turn !== asked) return; // another was chosen meanwhile, or none
      if (!html) { if (!again) close(); return; }
    } else if (!kept) return;
    if (!again) before = document.activeElement;
    chosen = name;
    const folded = [...shown.querySelectorAll("details")].map(d => d.open), top = detail.scrollTop;
    if (!again || html !== told) shown.innerHTML = told = html;
    else { mark(); return; }
    detail.hidden = false;
    mark();
    if (again) { shown.querySelectorAll("details").forEach((d, n) => { d.open = folded[n]; }); detail.scrollTop = top; }
    else detail.focus();
  }

  function close() {
    asked += 1;
    if (detail.hidden) return;
    detail.hidden = true;
    chosen = "";
    if (location.hash.startsWith("#stage=")) history.replaceState(null, "", location.pathname + location.search);
    mark();
    if (before && before.isConnected) before.focus();
  }

  function hash() {
    const found = /^#stage=(.+)$/.exec(location.hash);
    if (found) choose(decodeURIComponent(found[1]), false); else close();
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

  function resort(table) {
    const how = sorted.get(table.id);
    if (!how) return;
    [...table.tHead.rows[0].cells].forEach((head, n) => {
      if (n === how.column) head.setAttribute("aria-sort", how.falls ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
    });
    const key = row => { const cell = row.cells[how.column]; return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value); };
    const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, {numeric: true});
    const rows = [...table.tBodies[0].rows].map(row => [key(row), row]);
    // What has no value stays below.
    rows.sort(([a], [b]) => (a === "") - (b === "") || (how.falls ? compare(b, a) : compare(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  // -- runs: a row of a table brings out the lines of those that it names

  function bringOut(event) {
    const row = event.target.closest("#ranking tr, #report tr, #events tr");
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

  // The last of `places`, which rise, that is not after `at`.
  function last(places, at) {
    let low = 0, high = places.length;
    while (low < high) { const middle = (low + high) >> 1; if (places[middle] <= at) low = middle + 1; else high = middle; }
    return Math.max(0, low - 1);
  }

  const valueAt = ([iters, values], iter) => values.length ? values[last(iters, iter)] : null;

  function height([, top, bottom, low, high, log], value) {
    const part = log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
    return bottom - part * (bottom - top);
  }

  // What is nearest: a stage, or a stage of a run, at an iteration of it.
  function nearest(all, at) {
    const row = all.rows.find(([, top, bottom]) => at.y >= top && at.y < bottom);
    const panel = all.panels.find(([, top, bottom]) => at.y >= top - 10 && at.y < bottom + 10);
    let best = null;
    const offer = (stage, run, iter, far, y) => { if (!best || far < best.far) best = {stage, run, iter, far, y}; };
    for (const stage of all.stages) {
      const [begin, end] = stage.x, outside = Math.max(begin - at.x, at.x - end, 0);
      if (outside > 4) continue;
      const iter = Math.round(Math.min(1, Math.max(0, (at.x - begin) / (end - begin || 1))) * stage.n);
      if (row && (row[0] === null || row[0] === stage.lane)) offer(stage, null, iter, outside + stage.lane, null);
      else if (!row && (!panel || panel === all.panels[0])) {
        const y = height(all.panels[0], valueAt(stage.lr, iter));
        offer(stage, null, iter, Math.abs(y - at.y), y);
      } else if (!row) for (const [name, stages] of Object.entries(all.runs)) {
        const run = stages[stage.name];
        if (!run) continue;
        const course = panel[0].startsWith("loss") ? run.loss : [run.tests.map(t => t[0]), run.tests.map(t => t[1])];
        if (!course[0].length || iter > course[0][course[0].length - 1] + stage.n / 50) continue;
        const y = height(panel, valueAt(course, iter));
        offer(stage, name, iter, Math.abs(y - at.y), y);
      }
    }
    return best;
  }

  function say(all, {stage, run, iter, y}, event) {
    const values = byId("values"), frame = values.parentNode, names = Object.keys(all.runs), label = run ?? (names.length === 1 ? names[0] : null);
    const past = label === null ? null : all.runs[label][stage.name], tests = past ? past.tests.filter(t => t[0] <= iter && t[3] === 0) : [];
    const reached = past && past.loss[0].length && iter <= past.loss[0][past.loss[0].length - 1] + stage.n / 50;
    const test = tests.length ? tests[tests.length - 1] : null;
    const rows = [["iteration", iter + " of " + stage.n], ["epoch", ((stage.e[0] + iter * stage.b) / stage.e[1]).toFixed(3)],
      ["learning rate", valueAt(stage.lr, iter)], ["loss", reached ? valueAt(past.loss, iter) : null],
      ["top-1", reached && test ? test[1] + " % at " + test[0] : null], ["momentum", valueAt(stage.m, iter)], ["weight decay", valueAt(stage.d, iter)],
      ["batch", stage.b], ["image size", valueAt(stage.s, iter)], ["augmentation", stage.aug]];
    const table = document.createElement("table"), title = document.createElement("b");
    title.textContent = [label, stage.name].filter(Boolean).join(": ") + (stage.note ? ", " + stage.note : "");
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
    one.setAttribute("class", "dot " + stage.c);
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
    const found = at.y < all.y[0] || at.y > all.y[1] ? null : nearest(all, at);
    if (found) say(all, found, event); else hide();
  });

  window.addEventListener("hashchange", hash);
  if (document.body.dataset.version) listen();
  hash();
})();
