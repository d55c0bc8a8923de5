// Which bug is this? A layout and a factor in; the library's answer for that factor out.
"use strict";

pieces.start("which_bug", "which-bug", (root, table) => {
  const fields = pieces.fields(root, "The run");
  const start = { data: 4, expert: 1, pipeline: 1, tensor: 2, passes: 1 };
  const words = { passes: "accumulation, or micro-batches" };
  const names = Object.keys(table.sizes);
  const size = names.map((name) => pieces.choice(fields, name, words[name] || name, table.sizes[name], start[name], show));
  const seen = pieces.fields(root, "What is off");
  const of = pieces.choice(seen, "of", "it is", table.of.map((each) => [each, `a ${each}`]), "gradient", show);
  const ratio = pieces.make("input", { type: "number", min: "0", step: "any", name: "ratio", value: "4" });
  ratio.addEventListener("input", show);
  seen.append(pieces.make("label", {}, pieces.make("span", {}, "found / expected"), ratio));
  const answer = pieces.make("div", { "aria-live": "polite", class: "piece-answer" });
  root.append(answer);
  show();

  function show() {
    const asked = Number(ratio.value);
    const row = table.table[[of.value, ...size.map((select) => select.value)].join(",")];
    answer.replaceChildren();
    if (!row) return say("The expert size must divide the data size.");
    if (!(asked > 0) || !Number.isFinite(asked)) return say("Give a number above 0, such as 4 or 0.25.");
    const found = row.split(" ").map((part) => part.split(":")).filter(([from]) => Number(from) <= asked).pop()[1];
    const near = found.startsWith("?");
    const numbers = found.replace("?", "").split(".").filter(Boolean).map((number) => parseInt(number, 36));
    if (near) say("No combination of sizes of this layout has this value. The nearest:");
    if (!numbers.length) return say("All sizes of this layout are 1, so they cannot cause a factor.");
    const rows = numbers.map((number) => {
      const [value, cause, madeOf, sentence] = table.said[number];
      return pieces.make("tr", {}, pieces.make("td", {}, `× ${Number(value.toPrecision(4))}`), pieces.make("td", {}, madeOf),
        pieces.make("td", {}, pieces.make("code", {}, cause)), pieces.make("td", {}, sentence));
    });
    const head = ["factor", "made of", "cause", "possible mistake"].map((text) => pieces.make("th", { scope: "col" }, text));
    const box = pieces.make("div", { class: "piece-scroll", tabindex: "0", role: "region", "aria-label": "Possible mistakes" },
      pieces.make("table", {}, pieces.make("thead", {}, pieces.make("tr", {}, ...head)), pieces.make("tbody", {}, ...rows)));
    answer.append(box);
  }

  function say(text) {
    answer.append(pieces.make("p", {}, text));
  }
});
