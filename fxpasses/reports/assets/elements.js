"use strict";
// What the page is made of: text nodes and attributes, so that nothing from the data is ever parsed as HTML.
const SHOWN = 200;          // rows of a table that are rendered at once

function h(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "onclick" || key === "ontoggle" || key === "oninput") made[key] = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  for (const child of children.flat(6)) if (child !== null && child !== undefined) made.append(child);
  return made;
}
const link = (text, act) => h("a", { href: "#", onclick: (event) => { event.preventDefault(); act(); } }, text);
const scaled = (n, units, digits) => { for (const [least, name, more] of units) if (n >= least) return (n / least).toFixed(digits ?? more) + name; return null; };
const size = (n) => scaled(n, [[1e9, " GB", 2], [1e6, " MB", 1], [1e3, " kB", 1]]) ?? n + " B";
const flops = (n) => scaled(n, [[1e9, " G", 2], [1e6, " M", 1], [1e3, " k", 1]]) ?? String(n);
const seconds = (s) => s >= 1 ? s.toFixed(1) + " s" : s >= 1e-3 || !s ? (s * 1e3).toFixed(1) + " ms" : (s * 1e6).toFixed(0) + " us";
// Ticks of one axis: as many digits as keep them apart, and no more.
const ticks = (show, unit) => (_, values) => values.map((n) => show(n).replace(/^[\d.]+/, () => String(Number((n / unit(n)).toPrecision(4)))));
const thousands = (n) => n >= 1e9 ? 1e9 : n >= 1e6 ? 1e6 : n >= 1e3 ? 1e3 : 1;
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const base = (file) => file.split("/").pop();
const middle = (values) => { const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1; return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2; };
const card = (title, value, kind) => h("div", { class: "card" }, h("b", { class: kind }, value), h("span", { class: "soft" }, title));
const table = (heads, rows, total = rows.length) => !rows.length ? h("p", { class: "soft" }, "None.") : h("div", { class: "wide" }, h("table", {},
  heads.some(Boolean) ? h("tr", {}, heads.map((head) => h("th", { class: head.startsWith("#") ? "n" : null }, head.replace("#", "")))) : null,
  rows.slice(0, SHOWN).map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: heads[i].startsWith("#") ? "n" : null }, cell)))),
  total > SHOWN ? h("tr", {}, h("td", { colspan: heads.length, class: "soft" }, `${total - SHOWN} more: narrow it down with the search`)) : null));
const recompiled = (g) => table(["", ""], [["guard that failed", g.recompiled.reason], ...(g.recompiled.differs.length ? [["what differs", g.recompiled.differs.map((text) => h("div", {}, text))]] : [])]);
const whyAgain = (g) => g.recompiled ? g.recompiled.differs.join("; ") || g.recompiled.reason : "";
const secondsOf = (g) => Object.values(g.seconds.stages).reduce((a, b) => a + b, 0);

// Boxes ({id, label, sub, style, backward}) and edges ([from, to, style]) as a drawing; a click on a box is told.
function draw(boxes, edges, clicked) {
  const graph = new dagre.graphlib.Graph().setGraph({ nodesep: 18, ranksep: 34, rankdir: "TB", marginx: 12, marginy: 12 }).setDefaultEdgeLabel(() => ({}));
  for (const box of boxes) graph.setNode(String(box.id), { width: 26 + 7 * Math.max(box.label.length, Math.min(30, box.sub.length)), height: 40, box });
  for (const [from, to, style] of edges) graph.setEdge(String(from), String(to), { style: style || "" });
  dagre.layout(graph);
  const S = "http://www.w3.org/2000/svg", points = graph.edges().flatMap((edge) => graph.edge(edge).points);
  const left = Math.min(0, ...points.map((p) => p.x - 12)), width = Math.max(graph.graph().width, ...points.map((p) => p.x + 12)) - left, height = graph.graph().height;
  const s = (tag, props, ...children) => { const e = document.createElementNS(S, tag); for (const [k, v] of Object.entries(props)) e.setAttribute(k, v); e.append(...children); return e; };
  const svg = s("svg", { class: "graph", viewBox: `${left} 0 ${width} ${height}`, width, height, role: "img" });
  for (const edge of graph.edges()) {
    const found = graph.edge(edge).points, { x, y } = found[found.length - 1];
    svg.append(s("path", { class: graph.edge(edge).style || "", d: "M" + found.map((p) => `${p.x} ${p.y}`).join("L") + `M${x - 4} ${y - 6}L${x} ${y}L${x + 4} ${y - 6}` }));
  }
  for (const id of graph.nodes()) {
    const { x, y, width: w, height: t, box } = graph.node(id);
    const g = s("g", { transform: `translate(${x - w / 2} ${y - t / 2})` },
      s("rect", { width: w, height: t, rx: 6, class: (box.style || "") + (box.backward ? " backward" : "") }),
      s("text", { x: 8, y: 17 }, box.label), s("text", { x: 8, y: 33, opacity: 0.7 }, box.sub.slice(0, 34)));
    g.addEventListener("click", () => clicked(box));
    svg.append(g);
  }
  return h("div", { class: "wide" }, svg);
}
