// What the three pieces share: a table that the build wrote, labelled fields, text. No number is worked out here.
"use strict";

const pieces = {
  /** Load the table of a piece (a script that sets window.colonnade_NAME), then call `start(root, table)`. */
  start(name, id, start) {
    const root = document.getElementById(id);
    if (!root) return;
    const script = document.createElement("script");
    script.src = new URL(`table_${name}.js`, pieces.folder).href;
    script.onload = () => {
      root.replaceChildren();
      start(root, window[`colonnade_${name}`]);
      root.dataset.ready = "yes";
    };
    script.onerror = () => root.replaceChildren(pieces.make("p", {}, "The table of this piece is missing; build the site with make docs."));
    document.head.append(script);
  },

  /** An element with attributes and children. */
  make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  },

  /** The same for a shape of a drawing. */
  shape(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  },

  /** A labelled choice. `options` is a list of values or of [value, text]. */
  choice(parent, name, text, options, chosen, onChange) {
    const select = pieces.make("select", { name });
    for (const option of options) {
      const [value, shown] = Array.isArray(option) ? option : [option, option];
      select.append(pieces.make("option", { value }, String(shown)));
    }
    select.value = String(chosen);
    select.addEventListener("change", onChange);
    parent.append(pieces.make("label", {}, pieces.make("span", {}, text), select));
    return select;
  },

  /** A group of fields under one heading. */
  fields(parent, title) {
    const set = pieces.make("fieldset", {}, pieces.make("legend", {}, title));
    parent.append(set);
    return set;
  },

  /** "abab" as lists of ranks: [[0, 2], [1, 3]]; "-" is in none. */
  groups(letters) {
    const found = new Map();
    [...letters].forEach((letter, rank) => {
      if (letter !== "-") found.set(letter, [...(found.get(letter) || []), rank]);
    });
    return [...found.values()];
  },

  /** The group of one rank. */
  group(letters, rank) {
    return [...letters].flatMap((letter, other) => (letter === letters[rank] ? [other] : []));
  },

  list(ranks) {
    return `[${ranks.join(", ")}]`;
  },

  folder: document.currentScript.src,
};
