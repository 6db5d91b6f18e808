"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const TABS = [...(data.against ? ["Against"] : []), "Summary", "Source", "Graphs", "Passes", "Memory", "Sizes", "Kernels", ...(data.steps ? ["Steps"] : []), ...(data.ledger ? ["Tuning"] : []), ...(data.simulation ? ["Simulation"] : [])];
  const AROUND = 4;           // lines of source before and after one with operators
  const DRAWN = 120;          // boxes that are laid out at once
  const view = document.getElementById("view"), detail = document.getElementById("detail");
  const state = { graph: 0, tab: TABS[0], kind: null, node: null, line: null, search: "" };

  // One graph's rows as objects, made once.
  const COLUMN = {};
  data.graphs[0].node_fields.forEach((name, i) => { COLUMN[name] = i; });
  const made = new Map();
  function nodesOf(g, kind) {
    const key = g + "/" + kind;
    if (!made.has(key)) {
      const graph = data.graphs[g], found = graph.graphs[kind] || { nodes: [], inputs: {} }, C = COLUMN;
      const saved = new Set((graph.partition ? graph.partition.saved : []).map((row) => row[0]));
      const nodes = found.nodes.map((row, index) => ({
        index, name: row[C.name], target: graph.targets[row[C.target]], type: row[C.type], stride: row[C.stride], bytes: row[C.bytes],
        flops: row[C.flops], view: row[C.view], inputs: row[C.inputs], users: [], line: row[C.line], module: row[C.module] < 0 ? "" : graph.modules[row[C.module]][0],
        moduleType: row[C.module] < 0 ? "" : graph.modules[row[C.module]][1], backward: row[C.backward], forward: row[C.forward_node],
        meaning: found.inputs[row[C.name]] || "", saved: saved.has(row[C.name]), kind, graph: g,
      }));
      for (const node of nodes) node.region = node.target.startsWith("fxpasses.region_") || (node.target === "getitem" && nodes[node.inputs[0]].region);
      for (const node of nodes) for (const input of node.inputs) nodes[input].users.push(node.index);
      made.set(key, nodes);
    }
    return made.get(key);
  }
  const current = () => data.graphs[state.graph];
  const KINDS = ["inference", "forward", "backward", "joint"];
  const kindsOf = (g) => KINDS.filter((kind) => kind in data.graphs[g].graphs);
  const kinds = () => kindsOf(state.graph);
  const compiledKinds = (g = state.graph) => kindsOf(g).filter((kind) => kind !== "joint");
  const kindNow = () => kinds().includes(state.kind) ? state.kind : kinds()[0];
  const nodesNow = () => nodesOf(state.graph, kindNow());
  const lineText = (node) => { const [file, number] = data.graphs[node.graph].lines[node.line]; return `${base(file)}:${number}`; };
  const lineLink = (node) => node.line < 0 ? "" : link(lineText(node), () => { choose(node.graph); go({ tab: "Source", line: node.line }); });
  const findNode = (name, kind, g = state.graph) => {
    for (const one of kind ? [kind] : [kindNow(), ...kindsOf(g)]) {
      const found = one in data.graphs[g].graphs && nodesOf(g, one).find((node) => node.name === name);
      if (found) return found;
    }
    return null;
  };
  const linkTo = (node) => link(node.meaning || node.name, () => show(node));
  const nodeLink = (name, kind) => { const node = findNode(name, kind); return node ? linkTo(node) : name; };

  // The nodes that compute a node's gradient, or the one whose gradient it computes.
  const gradients = new Map();
  function partners(node) {
    if (!kindsOf(node.graph).includes("backward")) return [];
    if (node.forward) { const found = findNode(node.forward, "forward", node.graph); return found ? [found] : []; }
    if (!gradients.has(node.graph)) {
      const found = new Map();
      for (const other of nodesOf(node.graph, "backward")) if (other.backward && other.forward) { if (!found.has(other.forward)) found.set(other.forward, []); found.get(other.forward).push(other); }
      gradients.set(node.graph, found);
    }
    return node.backward ? [] : gradients.get(node.graph).get(node.name) || [];
  }

  function show(node) {
    choose(node.graph);
    state.node = node;
    const all = nodesOf(state.graph, node.kind), pairs = [], others = partners(node);
    if (others.length) pairs.push([node.forward ? "gradient of" : "its gradient", others.slice(0, 12).map((other) => [linkTo(other), " "])]);
    const kernels = current().kernels.filter((k) => k.graph === node.kind).flatMap((k) => k.kernels).filter(([, names]) => names.includes(node.name));
    detail.replaceChildren(
      h("div", {}, h("b", {}, node.meaning || node.name), " ", h("span", { class: "soft" }, `${node.kind} graph${data.graphs.length > 1 ? ` of ${current().name}` : ""}`), " ",
        h("button", { onclick: () => { detail.hidden = true; }, "aria-label": "close" }, "close")),
      h("div", { class: "code" }, `${node.name}: ${node.type} = ${node.target}`),
      table(["", ""], [
        ["stride", node.stride + (node.view ? " (a view of its input)" : "")], ["bytes", size(node.bytes)], ["FLOPs", flops(node.flops)],
        ["line", node.line < 0 ? "unknown" : [lineLink(node), " ", h("code", {}, current().lines[node.line][3])]],
        ["module", node.module ? `${node.module} (${node.moduleType})` : node.moduleType],
        ["inputs", node.inputs.map((i) => [linkTo(all[i]), " "])],
        ["used by", node.users.slice(0, 20).map((i) => [linkTo(all[i]), " "])],
        ...pairs, ...(node.saved ? [["saved", "for the backward pass"]] : []),
        ...(kernels.length ? [["kernel", kernels.map(([name]) => name).join(", ")]] : []),
      ]),
      link("draw its neighbours", () => go({ tab: "Graphs", kind: node.kind, node })));
    detail.hidden = false;
  }

  // A graph and those of its regions, each with the number of its copies.
  function withRegions(number, times = 1) {
    const graph = data.graphs[number], taken = graph.regions ? graph.regions.repeats.filter((item) => item.taken) : [], under = `${graph.name}/regions/`;
    const inner = data.graphs.map((other, i) => [other.name, i]).filter(([name]) => name.startsWith(under) && !name.slice(under.length).includes("/"));
    return [[number, times], ...inner.flatMap(([, i], k) => withRegions(i, times * (taken[k] ? taken[k].copies : 1)))];
  }
  // The bytes and FLOPs of other budgets, from the partitioner's own chain of cuts.
  function budget(p) {
    const curve = p.curve || [];
    if (curve.length < 2) return [];
    const full = curve[0][0], zero = curve[curve.length - 1][0], told = h("p", {}), holder = h("div");
    const share = (bytes) => full === zero ? 1 : (bytes - zero) / (full - zero);
    const tell = (value) => { const [bytes, work] = curve.find((point) => share(point[0]) <= value) || curve[curve.length - 1];
      told.replaceChildren(h("code", {}, `options={"memory_budget": ${value}}`), ` would save ${size(bytes)}`, work ? `, and compute ${flops(work)} FLOPs of expensive operators again` : "", value === p.memory_budget ? ", as it does now" : ""); };
    const slider = h("input", { type: "range", min: 0, max: 1, step: 0.01, value: p.memory_budget, "aria-label": "memory budget", oninput: () => tell(Number(slider.value)) });
    tell(p.memory_budget);
    setTimeout(() => { if (!holder.isConnected) return; const color = getComputedStyle(document.body).color, grid = { stroke: "#8884" }, points = [...curve].reverse();
      new uPlot({ width: Math.max(280, Math.min(700, holder.clientWidth - 8)), height: 180, scales: { x: { time: false } }, legend: { show: false },
        series: [{}, { stroke: "#3b82d6", points: { show: true } }], axes: [{ stroke: color, grid, values: ticks(size, thousands) },
          { stroke: color, grid, size: 70, values: ticks(flops, thousands) }] }, [points.map((point) => point[0]), points.map((point) => point[1])], holder); }, 0);
    return [h("label", { class: "row" }, "memory budget", slider), told, h("p", { class: "soft" }, "FLOPs that are computed again, by bytes that are saved; regions have curves of their own:"), holder];
  }

  const VIEWS = {
    Against() {
      const found = data.against, show = (value) => value === null || value === undefined ? "-" : typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(3) : String(value);
      const ratio = (a, b) => typeof a === "number" && typeof b === "number" && a ? "x " + (b / a).toPrecision(3) : "";
      return [h("h2", {}, "What differs"), h("p", {}, "before: ", h("code", {}, found.directory)),
        found.graphs.map((graph) => [h("h2", {}, graph.name), Object.keys(graph.groups).length ? Object.entries(graph.groups).map(([title, rows]) =>
          [h("h3", {}, title), table(title.startsWith("Versions") ? ["", "before", "now", ""] : ["", "#before", "#now", "#"], rows.map(([what, a, b]) => [what, show(a), show(b), ratio(a, b)]))]) : h("p", {}, "Nothing.")]),
        found.only_before.length ? h("p", { class: "warm" }, `only before: ${found.only_before.join(", ")}`) : null,
        found.only_after.length ? h("p", { class: "warm" }, `only now: ${found.only_after.join(", ")}`) : null];
    },
    Summary() {
      const g = current(), total = secondsOf(g), wholes = data.graphs.flatMap((graph, i) => graph.name.includes("/regions/") ? [] : [[graph, i]]);
      const counts = kinds().map((kind) => [kind, nodesOf(state.graph, kind).length]);
      const bar = (parts, whole) => h("div", {}, parts.filter(([, s]) => s > 0).map(([name, s, cls]) =>
        h("span", { class: cls, style: `width: ${100 * s / whole}%`, title: `${name}: ${seconds(s)}` }, cls ? "" : `${name} ${seconds(s)}`)));
      const stages = Object.entries(g.seconds.stages).sort((a, b) => b[1] - a[1]);
      const second = stages.flatMap(([name, s]) => {
        if (name !== "passes") return [["", s, "gap"]];
        const runs = g.passes.map((run) => [`${run.name} (${run.graph})`, run.seconds]), rest = s - runs.reduce((a, r) => a + r[1], 0);
        return [...runs, ["", Math.max(0, rest), "gap"]];
      });
      return [
        h("h2", {}, "Most worth doing"),
        data.advice.length ? h("ol", {}, data.advice.map((item) => h("li", {}, h("b", {}, item.title), h("br"), h("span", { class: "soft" }, item.why), h("br"),
          h("span", {}, item.do), item.source ? [h("br"), h("code", {}, item.source)] : null))) : h("p", {}, "Nothing stands out."),
        (data.eager || []).length ? [h("h2", { class: "warm" }, "Left in eager"), table(["where", "why"], data.eager.map((left) => [h("code", {}, left.location), left.reason]))] : null,
        h("h2", {}, "What was compiled"),
        wholes.length > 1 ? table(["graph", "#nodes", "#compiling", "#saved for backward", "in eager", "compiled again for", "ends with a graph break at"], wholes.map(([graph, i]) => [
          link(graph.name, () => { choose(i); go({ tab: "Summary" }); }), compiledKinds(i).map((kind) => nodesOf(i, kind).length).join(" + "), seconds(secondsOf(graph)), graph.partition ? size(graph.partition.saved_bytes) : "",
          graph.fallbacks.length ? "all of it" : graph.isolated.map((call) => call.target).join(" "), whyAgain(graph), graph.ended && graph.ended.where ? `${base(graph.ended.where.file)}:${graph.ended.where.line}` : ""])) : null, wholes.length > 1 ? h("h2", {}, g.name) : null,
        h("div", { class: "cards" }, card("graphs and regions, in all", String(data.graphs.length)), counts.map(([kind, n]) => card(`nodes, ${kind}`, n.toLocaleString("en"))),
          card("compiling", seconds(total)), g.partition ? card("saved for backward", size(g.partition.saved_bytes)) : null,
          card("guards", String(g.guards.length)), card("fallbacks", String(g.fallbacks.length + g.isolated.length))),
        g.kernels.length ? h("p", { class: "soft" }, `${g.kernels.filter((part) => part.from_cache).length} of ${count(g.kernels.length, "part")} that Inductor compiled came from its cache`) : null,
        h("p", { class: "soft" }, `${g.name}; torch ${g.versions.torch}, fxpasses ${g.versions.fxpasses}` + (g.process ? `; process ${g.process}` : "")),
        new Set(data.graphs.map((graph) => (graph.process || "").split(",")[0])).size > 1 ? h("p", { class: "warm" },
          "These are graphs of several processes, such as earlier runs: give each a directory of its own, or empty this one, if they do not belong together.") : null,
        g.recompiled ? [h("h2", { class: "warm" }, "Compiled again"), recompiled(g)] : null,
        g.ended ? [h("h2", { class: "warm" }, "Ends with a graph break"), h("p", { class: "soft" }, `Dynamo says: ${g.ended.reason}`), g.ended.where
          ? h("p", {}, h("code", {}, `${g.ended.where.file}:${g.ended.where.line}: ${g.ended.where.code}`)) : null] : null,
        h("details", {}, h("summary", {}, "options"), table(["", ""], Object.entries(g.settings || {}))),
        h("h2", {}, "Seconds by stage"), h("div", { class: "flame" }, bar([["all stages", total]], total || 1), bar(stages, total || 1), bar(second, total || 1)),
        g.fallbacks.length ? [h("h2", { class: "warm" }, "Fallbacks"), table(["stage", "reason", "where"], g.fallbacks.map((f) => [f.stage, f.reason, f.location]))] : null,
        g.isolated.length ? [h("h2", { class: "warm" }, "In eager"), table(["operator", "reason", "where"], g.isolated.map((f) => [f.target, f.reason, f.source]))] : null,
        h("h2", {}, "Regions"), h("pre", { class: "wraps" }, g.regions ? g.regions.text : "Nothing is compiled once for several layers here."),
      ];
    },
    Source() {
      const g = current(), files = {}, marks = {};
      const cellOf = (file, number, code) => (((files[file] ||= {})[number]) ||= { ops: 0, flops: 0, bytes: 0, saved: 0, code });
      for (const [number, times] of withRegions(state.graph)) {
        const graph = data.graphs[number];
        for (const kind of KINDS) if (kind !== "joint" && kind in graph.graphs) for (const node of nodesOf(number, kind)) {
          if (node.line < 0 || node.target === "placeholder" || node.target === "output" || node.region) continue;
          const [file, row, , code] = graph.lines[node.line], cell = cellOf(file, row, code);
          cell.ops += times; cell.flops += times * node.flops; cell.bytes += node.view ? 0 : times * node.bytes;
          if (node.saved && kind === "forward") cell.saved += times * node.bytes;
        }
      }
      const mark = (where, word, text) => { (((marks[where.file] ||= {})[where.line]) ||= []).push([word, text]); };
      for (const guard of g.guards) if (guard.where) mark(guard.where, "guard", guard.expression);
      for (const { ended } of data.graphs) if (ended && ended.where) { mark(ended.where, "graph break", ended.reason); cellOf(ended.where.file, ended.where.line, ended.where.code); }
      const others = data.graphs.filter((graph) => !graph.name.includes("/regions/")).length > 1;
      const wanted = state.line !== null && g.lines[state.line] ? g.lines[state.line] : null;
      const weight = (file) => Object.values(files[file]).reduce((sum, cell) => sum + cell.ops, 0);
      const names = Object.keys(files).sort((a, b) => weight(b) - weight(a));
      if (!names.length) return h("p", {}, "No line of the user's files is known.");
      return [others ? h("p", { class: "soft" }, `Operators of ${g.name} and its regions; those of other graphs are shown when one is chosen above.`) : null, ...names.map((file) => {
        const text = (data.sources[file] || "").split("\n"), body = h("div", { class: "wide" });
        const hot = Object.keys(files[file]).map(Number).sort((a, b) => a - b), near = new Set(hot.flatMap((n) => Array.from({ length: 2 * AROUND + 1 }, (_, i) => n - AROUND + i)));
        const fill = (whole) => {
          const all = text.length > 1 ? text.map((_, i) => i + 1) : hot, shown = all.filter((n) => whole || all === hot || near.has(n));
          const numbers = shown.flatMap((n, i) => i && shown[i - 1] !== n - 1 && all !== hot ? [null, n] : [n]);
          body.replaceChildren(shown.length < all.length ? h("p", {}, link("the whole file", () => fill(true))) : "", h("table", { class: "source" },
            h("tr", {}, ["", "ops", "FLOPs", "written", "saved", "", ""].map((head) => h("th", { class: "n" }, head))),
            numbers.map((number) => {
              if (number === null) return h("tr", {}, h("td", { colspan: 7, class: "soft" }, "..."));
              const cell = files[file][number], code = text.length > 1 ? text[number - 1] : cell.code, told = (marks[file] || {})[number];
              const here = wanted && wanted[0] === file && wanted[1] === number;
              return h("tr", { class: here ? "hot at" : cell ? "hot" : null, id: here ? "here" : null },
                h("td", { class: "n soft" }, String(number)),
                ["ops", "flops", "bytes", "saved"].map((key) => h("td", { class: "n" }, !cell || !cell[key] ? "" : key === "ops"
                  ? link(String(cell.ops), () => go({ tab: "Graphs", search: `${base(file)}:${number}` })) : key === "flops" ? flops(cell.flops) : size(cell[key]))),
                h("td", { class: "warm", title: told ? told.map((one) => one[1]).join("\n") : null }, told ? [...new Set(told.map((one) => one[0]))].join(", ") : ""), h("td", { class: "code" }, code));
            })));
        };
        const open = wanted ? wanted[0] === file : names[0] === file;
        const box = h("details", { open: open ? "" : null, ontoggle: () => { if (box.open && !body.firstChild) fill(); } }, h("summary", {}, h("code", {}, file), h("span", { class: "soft" }, ` ${weight(file)} operators`)), body);
        if (open) fill();
        return box;
      })];
    },
    Graphs() {
      const chooser = kinds().map((kind) => h("button", { onclick: () => go({ kind, node: null }), "aria-pressed": String(kind === kindNow()) },
        `${kind} (${nodesOf(state.graph, kind).length})`));
      const parts = [h("div", { class: "row" }, chooser)];
      if (state.search) {
        const word = state.search.toLowerCase(), found = data.graphs.flatMap((graph, g) => compiledKinds(g).concat(g === state.graph && kindNow() === "joint" ? ["joint"] : []).flatMap((kind) =>
          nodesOf(g, kind).filter((node) => `${node.name} ${node.meaning} ${node.target} ${node.type} ${node.module} ${node.moduleType} ${node.line < 0 ? "" : lineText(node) + " " + graph.lines[node.line][3]}`
            .toLowerCase().includes(word))));
        return [h("h2", {}, `${count(found.length, "node")} match${found.length === 1 ? "es" : ""}`), found.length ? nodeTable(found, true)
          : h("p", { class: "soft" }, "No graph of this report has such a node: names, operators, types, modules and their classes, files, lines and their code were looked through.")];
      }
      const nodes = nodesNow();
      if (state.node && state.node.kind === kindNow()) {
        const others = partners(state.node).slice(0, 12);
        parts.push(h("h2", {}, `Around ${state.node.meaning || state.node.name}`), link("back to the modules", () => go({ node: null })), h("div", { class: "pair" }, around([state.node]),
          others.length ? h("div", {}, h("p", { class: "soft" }, `${state.node.forward ? "the value" : "its gradient"}, in the ${others[0].kind} graph`), around(others, 1)) : null));
        return parts;
      }
      parts.push(h("h2", {}, "By module"), tree(nodes), h("h2", {}, "Modules, drawn"), modulesDrawn(nodes));
      return parts;
    },
    Passes() {
      const runs = current().passes.map((run, i) => [run, i]).sort((a, b) => b[0].changed - a[0].changed || a[1] - b[1]);
      return [h("h2", {}, "Passes, those that changed something first"), runs.map(([run]) => {
        const body = h("div");
        const box = h("details", { ontoggle: () => { if (box.open && !body.firstChild) body.append(...passBody(run)); } },
          h("summary", {}, h("b", {}, run.name), ` on ${run.graph}: `, run.changed
            ? `${run.nodes_before} to ${run.nodes_after} nodes (+${run.added.length} -${run.removed.length} ~${run.modified.length}), ${count(run.matches, "site")}`
            : "nothing to do", run.verdict ? h("span", { class: run.verdict.startsWith("wrong") ? "warm" : "good" }, `; ${run.verdict}`) : "", h("span", { class: "soft" }, `; in ${seconds(run.seconds)}, checked in ${seconds(run.check_seconds)}`)), body);
        return box;
      })];
    },
    Memory() {
      const g = current(), p = g.partition, parts = [];
      const series = [], parted = [], marks = [];
      for (const kind of compiledKinds()) {
        const found = live(nodesOf(state.graph, kind), new Set(kind === "backward" && p ? p.saved.filter((row) => row[3] === "activation").map((row) => row[0]) : []));
        parted.push([kind, series.length, found]); marks.push(`${kind} from ${series.length}`); series.push(...found);
      }
      const holder = h("div");
      parts.push(h("h2", {}, "Bytes that live, node by node"), h("p", { class: "soft" },
        marks.join(", ") + "; inputs and parameters included, by the sizes that were seen, before Inductor fuses and reuses"), holder);
      setTimeout(() => {
        const color = getComputedStyle(document.body).color, grid = { stroke: "#8884" };
        const lines = parted.map(([kind, from, found]) => [kind, series.map((_, i) => i >= from && i < from + found.length ? found[i - from] : null)]);
        const plot = () => new uPlot({ width: Math.max(280, holder.clientWidth - 8), height: 240, scales: { x: { time: false }, y: { range: (_, low, high) => [0, high * 1.05 || 1] } },
          series: [{ label: "node" }, ...lines.map(([label], i) => ({ label, stroke: ["#3b82d6", "#d9822b"][i], fill: ["#3b82d633", "#d9822b33"][i], value: (_, v) => v === null || v === undefined ? "-" : size(v) }))],
          axes: [{ stroke: color, grid }, { stroke: color, grid, size: 70, values: ticks(size, thousands) }] },
          [series.map((_, i) => i), ...lines.map(([, values]) => values)], holder);
        if (holder.isConnected && series.length) plot();
      }, 0);
      if (p) {
        const sum = (key) => { const found = new Map();
          for (const [number, times] of withRegions(state.graph)) if ("forward" in data.graphs[number].graphs) for (const node of nodesOf(number, "forward"))
            if (node.saved && node.target !== "placeholder" && !node.region) { const at = key(node, data.graphs[number]); found.set(at, (found.get(at) || 0) + times * node.bytes); }
          return [...found].sort((a, b) => b[1] - a[1]); };
        const where = (node, graph) => { if (node.line < 0) return "unknown"; const [file, number, , code] = graph.lines[node.line]; return `${base(file)}:${number} ${code}`; };
        parts.push(h("h2", {}, "Saved for the backward pass"), ...budget(p),
          h("p", {}, [...((p.curve || []).length > 1 ? [] : [`${size(p.saved_bytes)} saved at memory_budget ${p.memory_budget}`, p.memory_budget < 1 ? `${size(p.bytes_at_full_budget)} at 1` : null,
            p.bytes_at_zero_budget === null ? null : `${size(p.bytes_at_zero_budget)} at 0`]), p.recomputed_flops ? `${flops(p.recomputed_flops)} FLOPs are computed again, cheap operators included` : null].filter(Boolean).join("; ")),
          h("h2", {}, "By line"), table(["line", "#saved"], sum(where).map(([line, bytes]) => [line === "unknown" ? line : [link(line.split(" ")[0], () => go({ search: line.split(" ")[0] })), " ", h("code", {}, line.slice(line.indexOf(" ") + 1))], size(bytes)])),
          h("h2", {}, "By module"), table(["module", "#saved"], sum((node) => node.module || "(root)").map(([name, bytes]) => [name, size(bytes)])),
          h("h2", {}, "Value by value"), table(["value", "#bytes", "kind", "from", "why it is saved"], [...p.saved].sort((a, b) => b[1] - a[1])
            .map(([name, bytes, source, kind, why]) => [nodeLink(name, "forward"), size(bytes), kind, source, why])),
          h("h2", {}, "Computed again"), p.recomputed.length ? table(["value", "#FLOPs", "operator", "why"], p.recomputed.map(([name, n, source, why]) => [nodeLink(name, "backward"), flops(n), source, why])) : h("p", {}, "Nothing."));
      }
      return parts;
    },
    Sizes() {
      const g = current();
      return [h("h2", {}, "Symbols"), g.symbols.length ? table(["symbol", "range", "seen"], g.symbols.map((s) => [s.name, s.range, s.hint])) : h("p", {}, "All sizes are fixed."),
        h("h2", {}, "Compiled again"), data.graphs.some((graph) => graph.recompiled)
          ? table(["graph", "guard that failed", "what differs"], data.graphs.filter((graph) => graph.recompiled).map((graph) => [graph.name, graph.recompiled.reason, whyAgain(graph)]))
          : h("p", {}, "Nothing was compiled again."),
        h("h2", {}, "Guards: for which sizes this holds, who asked, how to avoid it"),
        g.guards.length ? table(["guard", "kind", "why", "operator", "where", "avoid"], g.guards.map((guard) => [h("code", {}, guard.expression), guard.kind, guard.why,
          guard.operator || "", guard.where ? `${base(guard.where.file)}:${guard.where.line}` : "", guard.avoid])) : h("p", {}, "None.")];
    },
    Kernels() {
      const g = current();
      if (!g.kernels.length) return h("p", {}, "Inductor wrote no code for this graph: ", (g.settings || {}).compiler === "eager" ? [h("code", {}, "compiler='eager'"), " runs it operator by operator."]
        : data.graphs.some((other) => other.name.startsWith(`${g.name}/regions/`)) ? "its regions hold all of it; choose one above." : "what it wrote is in its cache, or it failed; see Fallbacks.");
      return g.kernels.map((found) => {
        const code = h("pre", {}, found.code), all = g.kernels.filter((other) => other.graph === found.graph);
        const part = all.length > 1 ? `, part ${all.indexOf(found) + 1} of ${all.length} between calls of regions` : "";
        return [h("h2", {}, `${found.graph}${part}: ${count(found.kernels.length, "call")} of kernels`),
          table(["kernel", "#nodes", "computes"], found.kernels.map(([name, names]) => [h("code", {}, name), String(names.length), names.slice(0, 30).map((n) => [nodeLink(n, found.graph), " "])])),
          h("details", {}, h("summary", {}, "the code"), code)];
      });
    },
  };

  // What torch.profiler saw: Inductor names a compiled graph by its key, and a kernel "graph_0_NAME" on a CPU, "NAME" on a GPU.
  VIEWS.Steps = () => {
    const { compiled, eager, count: times } = data.steps;
    const known = new Map(), shown = new Set(), step = middle(compiled.seconds), ratio = middle(eager.seconds) / step;
    const profiled = middle(compiled.profiled || compiled.seconds), share = (s) => (100 * s / profiled).toFixed(1) + " %";
    data.graphs.forEach((graph, number) => graph.kernels.forEach((found) => {
      known.set(`## Call CompiledFxGraph ${found.key} ##`, [`${graph.name} ${found.graph}`, number]);
      const prefix = (found.code.match(/"(graph_\d+_)cpp_/) || ["", ""])[1];
      for (const [call, nodes] of found.kernels) { const name = call.split(":")[0]; known.set(prefix + name, [name, number, nodes]); }
    }));
    const find = ([key]) => known.get(key);
    const rows = (isKernel) => compiled.events.filter((event) => find(event) && Boolean(find(event)[2]) === isKernel).map((event) => {
      const [name, number, nodes] = find(event), spent = isKernel ? event[3] + event[4] : event[2];
      shown.add(event[0]);
      return [spent, [link(name, () => { choose(number); go({ tab: "Kernels" }); }), String(event[1]), seconds(spent), share(spent),
        nodes ? nodes.slice(0, 12).map((node) => [node, " "]) : ""]];
    }).sort((a, b) => b[0] - a[0]).map(([, row]) => row);
    const graphs = rows(false), kernels = rows(true), heads = ["", "#calls", "#time", "#of a step", "computes"];
    const other = new Map(eager.events.map((event) => [event[0], event])), names = new Set([...compiled.events, ...eager.events].map((event) => event[0]));
    const mine = new Map(compiled.events.map((event) => [event[0], event])), self = (event) => event ? event[3] + event[4] : 0;
    const both = [...names].filter((name) => !shown.has(name)).map((name) => [name, mine.get(name), other.get(name)])
      .sort((a, b) => Math.max(self(b[1]), self(b[2])) - Math.max(self(a[1]), self(a[2])));
    return [h("h2", {}, "A step"), h("div", { class: "cards" }, card("in eager", seconds(middle(eager.seconds))), card("compiled", seconds(step)), card("times as fast", ratio.toFixed(2), ratio < 1 ? "warm" : null)),
      h("p", { class: "soft" }, `Medians of ${times} steps, by turns. What follows is the median of ${times} steps under the profiler, which costs time itself: a compiled step took ${seconds(profiled)} there. `
        + "Timelines for ui.perfetto.dev: steps_compiled.trace.json, steps_eager.trace.json beside the graphs."),
      h("h2", {}, "Graphs and regions"), graphs.length ? table(heads.slice(0, 4), graphs.map((row) => row.slice(0, 4))) : h("p", {}, known.has(`## Call CompiledFxGraph  ##`) ? "Inductor did not name its graphs for the profiler (it does not where its cache cannot keep them)." : "None that Inductor compiled."),
      h("h2", {}, "Kernels"), kernels.length ? table(heads, kernels) : h("p", {}, "The profiler saw none. On a CPU, options={'inductor': {'cpp.enable_kernel_profile': True}} names them."),
      h("h2", {}, "All else, without what it calls"), table(["", "#calls, compiled", "#time, compiled", "#calls, eager", "#time, eager"],
        both.map(([name, a, b]) => [name, a ? String(a[1]) : "", a ? seconds(self(a)) : "", b ? String(b[1]) : "", b ? seconds(self(b)) : ""]))];
  };

  VIEWS.Tuning = () => data.ledger.map((graph) => {
    const kept = graph.steps.map((step) => step.name).join(", ") || "the default", digits = (n) => n === null ? "" : n.toFixed(2);
    return [h("h2", {}, `Graph ${graph.graph.slice(0, 8)}: ${kept}`),
      h("p", { class: "soft" }, [graph.ratio.length ? `${digits(graph.ratio[0])} [${digits(graph.ratio[1])}, ${digits(graph.ratio[2])}] of the default's time. ` : "",
        graph.struck ? `Struck: ${graph.struck}. ` : "", graph.left.length ? `No time for ${graph.left.join(", ")}.` : ""]),
      graph.entries.length ? table(["step", "outcome", "#predicted", "#time", "#interval", "#memory", "#calls", "verdict"], graph.entries.map((entry) => [entry.step, entry.outcome,
        digits(entry.predicted), digits(entry.ratio), entry.low === null ? "" : `${digits(entry.low)} to ${digits(entry.high)}`, digits(entry.memory), String(entry.changed || ""), entry.verdict]))
        : h("p", {}, "Nothing was tried.")];
  });

  VIEWS.Simulation = () => simulation(data.simulation);

  function nodeTable(nodes, everywhere) {
    const several = everywhere && data.graphs.length > 1;
    return table(["node", ...(everywhere ? ["graph"] : []), "operator", "type", "gradient", "#bytes", "#FLOPs", "line", "module"], nodes.slice(0, SHOWN).map((node) => [linkTo(node),
      ...(everywhere ? [several ? `${data.graphs[node.graph].name} ${node.kind}` : node.kind] : []), node.target, node.type,
      partners(node).slice(0, 3).map((other) => [node.backward ? "of " : "", linkTo(other), " "]), size(node.bytes), flops(node.flops), lineLink(node), node.module]), nodes.length);
  }

  // Modules that open; siblings that run the same operators are one row.
  function tree(nodes) {
    const root = { children: new Map(), own: [], path: "" };
    for (const node of nodes) {
      let at = root;
      for (const part of node.module ? node.module.split(".") : []) {
        if (!at.children.has(part)) at.children.set(part, { children: new Map(), own: [], path: at.path ? at.path + "." + part : part });
        at = at.children.get(part);
      }
      at.own.push(node);
    }
    const all = (group) => [...group.children.values()].reduce((sum, child) => sum.concat(all(child)), group.own);
    const render = (group, title) => {
      const body = h("div");
      const box = h("details", { ontoggle: () => { if (box.open && !body.firstChild) fill(); } }, h("summary", {}, title), body);
      const fill = () => {
        const like = new Map();
        for (const [name, child] of group.children) {
          const key = all(child).map((node) => node.target).join(), number = /^\d+$/.test(name);
          if (number && like.has(key)) like.get(key).push([name, child]); else like.set(number ? key : key + name, [[name, child]]);
        }
        for (const same of like.values()) {
          const under = all(same[0][1]), bytes = under.reduce((sum, node) => sum + (node.view ? 0 : node.bytes), 0);
          const text = same.length > 1 ? `${same[0][1].path} to ${same[same.length - 1][0]} x ${same.length}` : same[0][1].path;
          body.append(same.length > 1
            ? (() => { const rest = h("details", { ontoggle: () => { if (rest.open && rest.childNodes.length === 1) rest.append(...same.map(([, child]) => render(child, child.path))); } },
              h("summary", {}, `${text}: ${count(under.length, "node")} each, ${size(bytes)} written each`)); return rest; })()
            : render(same[0][1], `${text}: ${count(under.length, "node")}, ${size(bytes)} written`));
        }
        const inputs = group.own.filter((node) => node.target === "placeholder"), own = group.own.filter((node) => node.target !== "placeholder");
        if (inputs.length) { const rest = h("details", { ontoggle: () => { if (rest.open && rest.childNodes.length === 1) rest.append(nodeTable(inputs)); } },
          h("summary", {}, `inputs: ${inputs.length}`)); body.append(rest); }
        if (own.length) body.append(nodeTable(own));
      };
      if (group === root && group.children.size) { box.open = true; fill(); }
      return box;
    };
    return render(root, "the model");
  }

  const drawn = (boxes, edges) => draw(boxes.map((box) => ({ ...box, backward: box.node && box.node.backward, style: (box.style || "") + (box.node && box.node === state.node ? " at" : "") })), edges,
    (box) => box.node ? show(box.node) : box.search ? go({ search: box.search }) : null);

  // Modules of the first two levels as boxes: what runs after what, however many nodes there are.
  function modulesDrawn(nodes) {
    const depth = (levels) => nodes.map((node) => node.module.split(".").slice(0, levels).join(".") || (node.target === "placeholder" ? "inputs" : "(root)"));
    let names = depth(2);
    if (new Set(names).size > DRAWN) names = depth(1);
    const boxes = new Map(), edges = new Set();
    nodes.forEach((node, i) => { const box = boxes.get(names[i]) || { id: names[i], label: names[i], count: 0 }; box.count += 1; boxes.set(names[i], box); });
    for (const node of nodes) for (const i of node.inputs) if (names[i] !== names[node.index] && names[i] !== "inputs") edges.add(names[i] + "\n" + names[node.index]);
    if (boxes.size > DRAWN) return h("p", { class: "soft" }, `${boxes.size} modules are too many for one drawing; open one above, or draw a node's neighbours.`);
    const shown = [...boxes.values()].filter((box) => box.id !== "inputs");
    return drawn(shown.map((box) => ({ ...box, sub: count(box.count, "node"), search: box.id })), [...edges].map((edge) => edge.split("\n")));
  }

  function around(seeds, steps = 2) {
    const nodes = nodesOf(state.graph, seeds[0].kind), near = new Set(seeds.map((node) => node.index));
    for (let step = 0; step < steps; step++) for (const i of [...near]) if (!step || nodes[i].type.includes("[")) for (const j of [...nodes[i].inputs, ...nodes[i].users]) if (near.size < DRAWN / 2) near.add(j);
    return drawn([...near].map((i) => ({ id: i, label: nodes[i].meaning || nodes[i].name, sub: nodes[i].type, node: nodes[i], style: seeds.includes(nodes[i]) ? "at" : "" })),
      [...near].flatMap((i) => nodes[i].inputs.filter((j) => near.has(j)).map((j) => [j, i])));
  }

  // The diff of a pass as a graph: what is added, removed, changed, and what that reads or is read by.
  function changeDrawn(run) {
    const boxes = new Map(), calls = [];
    for (const text of run.diff) {
      const found = /^([-+ ])(\w+): (.+?) = (.+?)\((.*)\)$/.exec(text);
      if (!found) continue;
      const [, mark, name, type, target, given] = found, known = boxes.get(name);
      boxes.set(name, { id: name, label: name, sub: `${target} ${type}`, node: mark === "-" && !known ? null : findNode(name, run.graph), style: known ? "changed" : { "-": "remove", "+": "add", " ": "" }[mark] });
      calls.push([mark, name, new Set(given.match(/[A-Za-z_]\w*/g))]);
    }
    const edges = new Map();
    for (const [mark, name, given] of calls) for (const from of given) {
      if (!boxes.has(from)) { const node = mark === " " ? null : findNode(from, run.graph); if (!node) continue; boxes.set(from, { id: from, label: node.meaning || from, sub: node.type, node, style: "" }); }
      if (boxes.get(from).style || boxes.get(name).style) { const key = `${from} ${name}`, style = { "-": "remove", "+": "add", " ": "" }[mark]; edges.set(key, edges.has(key) && edges.get(key) !== style ? "" : style); }
    }
    const ends = new Set([...edges.keys()].flatMap((key) => key.split(" "))), shown = [...boxes.values()].filter((box) => box.style || ends.has(box.id));
    return shown.length > DRAWN ? h("p", { class: "soft" }, `${shown.length} nodes are too many for one drawing; the diff below has all.`) : drawn(shown, [...edges].map(([key, style]) => [...key.split(" "), style]));
  }

  function passBody(run) {
    const promises = Object.entries(run.contract || {}).filter(([, value]) => value.length).map(([name, value]) => [name, Array.isArray(value) ? value.join(", ") : value]);
    const parts = [h("p", { class: "soft" }, run.options), table(["contract", ""], promises),
      run.changed ? h("p", {}, `Structure: ${(current().settings || {}).check === "off" ? "not checked" : "as the contract says"}. Values: ${run.verdict || "not compared; options={'check': 'values'} does"}.`) : null];
    if (run.sites.length) parts.push(table(["#site", "operator", "node", "line", "module"], run.sites.map((site) => [String(site.index), site.target, nodeLink(site.node), site.source, site.module])));
    if (run.diff && run.diff.length) {
      const cells = [], out = [], into = [];
      const flush = () => { while (out.length || into.length) { const a = out.shift(), b = into.shift();
        cells.push(h("div", { class: a === undefined ? null : "remove" }, a || ""), h("div", { class: b === undefined ? null : "add" }, b || "")); } };
      for (const text of run.diff.slice(2)) {
        if (text.startsWith("-")) out.push(text.slice(1)); else if (text.startsWith("+")) into.push(text.slice(1));
        else { flush(); if (text.startsWith("@@")) cells.push(h("div", { class: "hunk" }, text)); else cells.push(h("div", {}, text.slice(1)), h("div", {}, text.slice(1))); }
      }
      flush();
      parts.push(changeDrawn(run), h("div", { class: "diff" }, cells));
      if (run.diff_left_out) parts.push(h("p", { class: "soft" }, `${run.diff_left_out} lines of the diff were left out.`));
    }
    return parts;
  }

  // Bytes of values between the node that makes them and the last that uses them, or a view of them.
  function live(nodes, freed) {
    const owner = nodes.map((node) => node.index), last = nodes.map((node) => node.index), change = new Array(nodes.length + 1).fill(0);
    nodes.forEach((node) => { if (node.view && node.inputs.length) owner[node.index] = owner[node.inputs[0]]; });
    nodes.forEach((node) => { for (const i of node.inputs) last[owner[i]] = Math.max(last[owner[i]], node.index); });
    nodes.forEach((node) => { if (owner[node.index] !== node.index) return; const from = node.target === "placeholder" ? 0 : node.index;
      change[from] += node.bytes; change[(node.target === "placeholder" && !freed.has(node.name) ? nodes.length - 1 : last[node.index]) + 1] -= node.bytes; });
    let sum = 0;
    return change.slice(0, -1).map((delta) => (sum += delta));
  }

  function go(wanted, how = "pushState") {
    const moves = "search" in wanted;
    Object.assign(state, moves && wanted.search ? { tab: "Graphs", node: null } : {}, "node" in wanted || "kind" in wanted ? { search: "" } : {}, wanted);
    const box = document.getElementById("search");
    if (box.value !== state.search) box.value = state.search;
    document.querySelectorAll("#tabs button").forEach((button) => {
      button.setAttribute("aria-selected", String(button.textContent === state.tab));
      if (button.textContent === state.tab) button.parentElement.scrollLeft = button.offsetLeft - 60;
    });
    view.replaceChildren(...[VIEWS[state.tab]()].flat(6).filter((part) => part !== null && part !== undefined));
    const here = document.getElementById("here");
    if (here && state.tab === "Source") here.scrollIntoView({ block: "center" });
    const address = `#${new URLSearchParams({ tab: state.tab, graph: data.graphs[state.graph].name, search: state.search })}`;
    if (location.hash !== address) history[location.hash ? how : "replaceState"](null, "", address);
  }

  // The address names tab, graph and search, so that one can go back, and send it on.
  function arrive() {
    const asked = new URLSearchParams(location.hash.slice(1)), graph = data.graphs.findIndex((one) => one.name === asked.get("graph"));
    choose(Math.max(graph, 0));
    go({ tab: TABS.includes(asked.get("tab")) ? asked.get("tab") : TABS[0], node: null, line: null, kind: null, search: asked.get("search") || "" }, "replaceState");
  }

  const select = document.getElementById("graph");
  function choose(g) {
    if (g !== state.graph) Object.assign(state, { graph: g, node: null, line: null, kind: null });
    select.value = String(g);
  }
  data.graphs.forEach((graph, i) => {
    const kinds = Object.entries(graph.graphs).filter(([kind]) => kind !== "joint").map(([kind, found]) => `${kind} ${found.nodes.length}`);
    select.append(h("option", { value: i }, `${graph.name}: ${kinds.join(", ")} nodes`));
  });
  select.addEventListener("change", () => { detail.hidden = true; choose(Number(select.value)); go({}); });
  document.getElementById("tabs").append(...TABS.map((tab) => h("button", { role: "tab", onclick: () => go({ tab, node: null, search: "" }) }, tab)));
  document.getElementById("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: TABS.length - 1 }[event.key], tab = TABS[(TABS.indexOf(state.tab) + step) % TABS.length];
    if (step) { go({ tab, node: null, search: "" }); document.querySelector('#tabs [aria-selected="true"]').focus(); }
  });
  let waiting = 0;
  document.getElementById("search").addEventListener("input", (event) => {
    clearTimeout(waiting); waiting = setTimeout(() => go({ search: event.target.value.trim(), tab: "Graphs" }, "replaceState"), 120);
  });
  window.addEventListener("popstate", arrive);
  arrive();
})();
