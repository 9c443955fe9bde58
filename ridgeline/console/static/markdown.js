// Markdown of a growing text into the DOM. Nothing of a model's text is parsed as HTML, fetched or run.

import * as smd from "streaming-markdown";

const SAFE = /^(https?:|mailto:)/i;

export function markdownInto(element) {
  const renderer = smd.default_renderer(element);
  const plain = renderer.set_attr;
  renderer.set_attr = (data, type, value) => {
    const node = data.nodes[data.index];
    if (type === smd.SRC) {
      // An image would be a request to a foreign host: its address is shown instead.
      node.replaceWith(Object.assign(document.createElement("code"), { textContent: `image: ${value}` }));
    } else if (type === smd.HREF) {
      if (!SAFE.test(value)) return;
      plain(data, type, value);
      node.target = "_blank";
      node.rel = "noopener noreferrer";
    } else plain(data, type, value);
  };
  const parser = smd.parser(renderer);
  return { write: (text) => smd.parser_write(parser, text), end: () => smd.parser_end(parser) };
}
