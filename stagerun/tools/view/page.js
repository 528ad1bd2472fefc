// The page's script: it puts in the sections that the server has rendered, chooses stages and sorts tables. It makes no markup of data:
// what it writes itself is text.
"use strict";
(function () {
  const detail = document.getElementById("detail"), shown = detail.querySelector("div"), byId = id => document.getElementById(id);
  const sorted = new Map(); // by the id of a table: column, and whether it falls
  let chosen = "", before = null;

  // -- sections, as the server sends them

  function put(id, html) {
    const place = byId(id), held = place.contains(document.activeElement) ? document.activeElement : null;
    const stage = held && held.dataset.stage, open = new Map([...place.querySelectorAll("details[id]")].map(d => [d.id, d.open]));
    const scrolls = new Map([...place.querySelectorAll("table")].map(t => [t.id, t.parentNode.scrollTop]));
    place.innerHTML = html;
    place.hidden = html === "";
    for (const [name, is] of open) if (byId(name)) byId(name).open = is;
    for (const [name, top] of scrolls) if (byId(name)) byId(name).parentNode.scrollTop = top;
    place.querySelectorAll("table").forEach(resort);
    mark();
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
    for (const one of document.querySelectorAll("main [data-stage]")) {
      const is = one.dataset.stage === chosen;
      if (one.tagName === "g") one.classList.toggle("picked", is);
      else if (is) one.setAttribute("aria-current", "true"); else one.removeAttribute("aria-current");
      one.closest("tr")?.classList.toggle("chosen", is);
    }
  }

  async function choose(name, again) {
    const kept = [...document.querySelectorAll("[data-detail]")].find(e => e.dataset.detail === name);
    let html = kept ? kept.innerHTML : "";
    if (!kept && document.body.dataset.version) {
      const answer = await fetch("stage/" + encodeURIComponent(name)).catch(() => null);
      if (!answer || !answer.ok) { if (!again) close(); return; }
      html = await answer.text();
    } else if (!kept) return;
    if (!again) before = document.activeElement;
    chosen = name;
    const folded = [...shown.querySelectorAll("details")].map(d => d.open), top = detail.scrollTop;
    shown.innerHTML = html;
    detail.hidden = false;
    mark();
    if (again) { shown.querySelectorAll("details").forEach((d, n) => { d.open = folded[n]; }); detail.scrollTop = top; }
    else detail.focus();
  }

  function close() {
    if (detail.hidden) return;
    detail.hidden = true;
    chosen = "";
    history.replaceState(null, "", location.pathname + location.search);
    mark();
    if (before && before.isConnected) before.focus();
  }

  function hash() {
    const found = /^#stage=(.+)$/.exec(location.hash);
    if (found) choose(decodeURIComponent(found[1]), false);
  }

  function activate(stage) {
    const wanted = "#stage=" + encodeURIComponent(stage);
    if (location.hash === wanted) hash(); else location.hash = wanted;
  }

  document.addEventListener("click", event => {
    const on = event.target.closest("[data-stage]"), head = event.target.closest("th button"), images = event.target.closest("[data-images]");
    if (on) { event.preventDefault(); on.focus?.(); activate(on.dataset.stage); }
    else if (head) sort(head);
    else if (images) look(images);
    else if (event.target.id === "close") close();
  });
  document.addEventListener("keydown", event => {
    const on = document.activeElement;
    if (event.key === "Escape") close();
    else if ((event.key === "Enter" || event.key === " ") && on.tagName === "g" && on.dataset.stage) { event.preventDefault(); activate(on.dataset.stage); }
  });

  // What the network gets to see: asked for, since it takes a moment.
  async function look(button) {
    const say = button.nextElementSibling;
    say.textContent = "reading images ...";
    const answer = await fetch("images/" + encodeURIComponent(button.dataset.images)).catch(() => null);
    if (!answer || !answer.ok) { say.textContent = answer ? await answer.text() : "the server has gone"; return; }
    const read = new FileReader();
    read.onload = () => {
      const image = new Image();
      image.alt = "images of stage " + button.dataset.images + " as its network gets them";
      image.src = read.result;
      say.replaceChildren(image);
    };
    read.readAsDataURL(await answer.blob());
  }

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

  window.addEventListener("hashchange", hash);
  if (document.body.dataset.version) listen();
  hash();
})();
