// The pipeline player: an order, ranks and micro-batches in; timeline, bubble and memory out.
"use strict";

pieces.start("pipeline", "pipeline-player", (root, table) => {
  const state = { time: 0, timer: null, run: null, rows: [] };
  const fields = pieces.fields(root, "The schedule");
  const order = pieces.choice(fields, "order", "order", Object.keys(table.orders), "1f1b", fill);
  const ranks = pieces.choice(fields, "ranks", "ranks", table.ranks, 4, show);
  const chunks = pieces.choice(fields, "chunks", "stages on a rank", [1], 1, show);
  const micro = pieces.choice(fields, "micro_batches", "micro-batches", table.micro_batches, 8, show);
  const answer = pieces.make("div", { "aria-live": "polite", class: "piece-answer" });
  const scroll = pieces.make("div", { class: "piece-timeline", tabindex: "0", role: "region", "aria-label": "Timeline, a row for each rank" });
  const play = pieces.make("button", { type: "button", class: "piece-play" }, "Play");
  const slider = pieces.make("input", { type: "range", min: "0", step: "1", value: "0", name: "time" });
  const clock = pieces.make("output", { class: "piece-clock" });
  const controls = pieces.make("div", { class: "piece-controls" }, play, pieces.make("label", {}, pieces.make("span", {}, "time"), slider), clock);
  const now = pieces.make("div", { class: "piece-now" });
  root.append(answer, controls, scroll, now);
  slider.addEventListener("input", () => { pause(); state.time = Number(slider.value); tick(); });
  play.addEventListener("click", () => (state.timer ? pause() : go()));
  fill();

  function fill() {
    const allowed = table.orders[order.value];
    chunks.replaceChildren(...allowed.map((count) => pieces.make("option", { value: count }, String(count))));
    chunks.disabled = allowed.length === 1;
    show();
  }

  function show() {
    pause();
    state.time = 0;
    state.run = table.runs[[order.value, ranks.value, chunks.value, micro.value].join(",")];
    answer.replaceChildren();
    scroll.replaceChildren();
    now.replaceChildren();
    controls.hidden = Boolean(state.run.refused);
    scroll.hidden = controls.hidden;
    if (state.run.refused) {
      answer.append(pieces.make("p", {}, state.run.refused));
      return;
    }
    state.rows = state.run.rows.map(placed);
    const lines = pieces.make("dl");
    const line = (name, key, text) => lines.append(pieces.make("dt", {}, name), pieces.make("dd", { "data-key": key }, text));
    line("Step takes", "span", `${state.run.span} units (a forward pass takes ${table.costs.F}, a full backward pass ${table.costs.B})`);
    line("Bubble", "bubble", `${(100 * state.run.bubble).toFixed(1)}% of the ranks' time is waiting`);
    line("Most micro-batches in memory", "peak", state.run.peak.map((count, rank) => `rank ${rank}: ${count}`).join(", "));
    answer.append(lines);
    scroll.append(drawing());
    slider.max = String(state.run.span - 1);
    tick();
  }

  // A row of the table, "0F0 ~3 0B0", as actions with the time at which each starts.
  function placed(row, rank) {
    let at = 0, index = 0;
    const found = [];
    for (const word of row.split(" ")) {
      if (word.startsWith("~")) { at += Number(word.slice(1)); continue; }
      const [, stage, kind, batch] = word.match(/^(\d*)([FBIW])(\d+)$/);
      const length = table.costs[kind];
      found.push({ stage: stage || String(rank), kind, batch, start: at, end: at + length, held: state.run.held[rank].charCodeAt(index++) - 48, word });
      at += length;
    }
    return found;
  }

  function drawing() {
    // As wide as the page lets it, down to what can still be read; beyond that it scrolls.
    const high = 30, left = 52, unit = Math.max(16, Math.min(34, (scroll.clientWidth - left - 4) / state.run.span));
    const width = left + unit * state.run.span + 4, height = high * state.rows.length + 8;
    const svg = pieces.shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Timeline of ${order.value}` });
    state.rows.forEach((row, rank) => {
      svg.append(pieces.shape("text", { x: 4, y: rank * high + 20, class: "left" }, `rank ${rank}`));
      for (const action of row) {
        const colour = { F: "c0", B: "c1", I: "c1", W: "c2" }[action.kind];
        const later = chunks.value !== "1" && Number(action.stage) >= state.rows.length ? " later" : "";
        const x = left + action.start * unit, wide = (action.end - action.start) * unit - 2;
        action.box = pieces.shape("g", { class: `action ${colour}${later}` },
          pieces.shape("rect", { x, y: rank * high + 4, width: wide, height: high - 6, rx: 4, class: colour }),
          pieces.shape("text", { x: x + wide / 2, y: rank * high + 18, class: "inside small" }, `${action.kind}${action.batch}`),
          pieces.shape("title", {}, `stage ${action.stage}, ${action.kind}${action.batch}, from ${action.start} to ${action.end}`));
        svg.append(action.box);
      }
    });
    state.line = pieces.shape("rect", { x: left, y: 0, width: unit, height, class: "now-line" });
    state.unit = unit;
    state.left = left;
    svg.append(state.line);
    return svg;
  }

  function tick() {
    slider.value = String(state.time);
    clock.textContent = `${state.time} of ${state.run.span}`;
    const x = state.left + state.time * state.unit;
    state.line.setAttribute("x", x);
    if (x < scroll.scrollLeft || x + state.unit > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = Math.max(0, x - state.left);
    const table_ = pieces.make("table", {}, pieces.make("caption", {}, "At this time"));
    const head = pieces.make("tr", {}, ...["rank", "does", "micro-batches held"].map((text) => pieces.make("th", { scope: "col" }, text)));
    table_.append(pieces.make("thead", {}, head));
    const body = pieces.make("tbody");
    state.rows.forEach((row, rank) => {
      const doing = row.find((action) => action.start <= state.time && state.time < action.end);
      const last = row.filter((action) => action.end <= state.time).pop();
      const left = last ? last.held - Number("BW".includes(last.kind)) : 0;  // what ended a micro-batch has given it up
      const held = doing ? doing.held : left;
      for (const action of row) action.box.classList.toggle("done", action.end <= state.time);
      const names = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
      body.append(pieces.make("tr", {}, pieces.make("th", { scope: "row" }, String(rank)),
        pieces.make("td", {}, doing ? `${names[doing.kind]} of micro-batch ${doing.batch}, stage ${doing.stage}` : "waits"),
        pieces.make("td", {}, String(held / Number(chunks.value)))));
    });
    table_.append(body);
    now.replaceChildren(table_);
  }

  function go() {
    if (state.time >= state.run.span - 1) state.time = -1;
    play.textContent = "Pause";
    state.timer = setInterval(() => {
      state.time += 1;
      tick();
      if (state.time >= state.run.span - 1) pause();
    }, 350);
  }

  function pause() {
    clearInterval(state.timer);
    state.timer = null;
    play.textContent = "Play";
  }
});
