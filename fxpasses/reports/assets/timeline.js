"use strict";
function simulation(found) {
  const mesh = Object.entries(found.mesh).map(([name, n]) => `${name}=${n}`).join(","), key = (row) => JSON.stringify(Object.values(row).slice(3));
  const settings = found.settings.filter((row, i, all) => all.findIndex((one) => key(one) === key(row)) === i);
  return [h("h2", {}, `A step on ${found.ranks} devices (${mesh}), estimated: ${found.best}`), timeline(found),
    h("p", { class: "soft" }, `Below the streams: bytes that live, most at ${found.peak_at}: ${Object.entries(found.alive_at_peak).map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ")}`),
    h("h2", {}, "Settings"), table(["", "#step", "#computes", "#network", "#waits", "#messages", "#memory"], settings.map((row) => [row.name, seconds(row.seconds), seconds(row.compute),
      seconds(row.network), seconds(row.exposed), String(row.messages), size(row.peak_bytes)])),
    h("h2", {}, "The best, if"), table(["", "#step"], Object.entries(found.seconds_if).map(([what, taken]) => [what, seconds(taken)]))];
}

// A row for each stream, and below them the bytes that live. Dragging zooms in, a double click out.
function timeline(found) {
  const ROW = 24, COLORS = { compute: "#3b82d6", wait: "#d1433f" }, LABELS = 110;
  const holder = h("div"), told = h("p", { class: "soft" }), streams = found.streams, peak = Math.max(1, ...found.memory.map((point) => point[1]));
  const start = `${found.events.length} calls take time; point at one`;
  told.textContent = start;
  setTimeout(() => {
    if (!holder.isConnected) return;
    const fore = getComputedStyle(document.body).color, grid = { stroke: "#8884" }, below = 140, height = ROW * streams.length + below + 40;
    const top = (row) => row * ROW, ends = found.memory.map((point) => point[0]);
    const draw = (u) => {
      const { ctx, bbox } = u, scale = devicePixelRatio;
      ctx.save();
      ctx.font = `${12 * scale}px system-ui, sans-serif`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      streams.forEach((name, row) => { ctx.fillStyle = fore; ctx.fillText(name.slice(0, 16), 4 * scale, bbox.top + (top(row) + ROW / 2) * scale); });
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      for (const [row, name, graph, from, taken] of found.events) {
        const left = u.valToPos(from, "x", true), width = Math.max(scale, u.valToPos(from + taken, "x", true) - left), y = bbox.top + top(row) * scale;
        if (left + width < bbox.left || left > bbox.left + bbox.width) continue;
        ctx.globalAlpha = graph === "backward" ? 0.65 : 1;
        ctx.fillStyle = COLORS[streams[row]] || "#2da44e";
        ctx.fillRect(left, y + 2 * scale, width, (ROW - 4) * scale);
        ctx.globalAlpha = 1;
        if (width > 60 * scale) { ctx.fillStyle = "#fff"; ctx.fillText(name.slice(0, width / scale / 8), left + 4 * scale, y + ROW / 2 * scale); }
      }
      ctx.restore();
    };
    const point = (u) => {
      const { left, top: y } = u.cursor, row = Math.floor(y / ROW), at = u.posToVal(left, "x"), near = u.posToVal(left + 2, "x") - at;
      const event = left >= 0 && found.events.find((one) => one[0] === row && at >= one[3] - near && at <= one[3] + one[4] + near);
      told.textContent = event ? `${event[1]} (${event[2]}): ${seconds(event[4])} from ${seconds(event[3])} on` + (event[5] ? `, ${size(event[5])}` : "") : start;
    };
    new uPlot({ width: Math.max(280, holder.clientWidth - 8), height, legend: { show: false }, hooks: { draw: [draw], setCursor: [point] }, cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: [0, peak * (1 + ROW * streams.length / below)] } },
      series: [{}, { stroke: "#3b82d6", fill: "#3b82d633", points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) }],
      axes: [{ stroke: fore, grid, values: (_, ticks) => ticks.map(seconds) }, { stroke: fore, grid, size: LABELS, values: (_, ticks) => ticks.map((tick) => tick <= peak ? size(tick) : "") }] },
      [ends, found.memory.map((point) => point[1])], holder);
  }, 0);
  return [told, holder];
}
