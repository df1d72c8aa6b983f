// The markdown that models write, as nodes: text goes in as text nodes, so that none of it can become markup.

// Bounded, so that text full of openings costs linear time.
const INLINE = /(`{1,2})([^`](?:.{0,500}?[^`])?)\1(?!`)|\*\*(\S(?:.{0,500}?\S)?)\*\*|\*([^\s*](?:[^*]{0,500}[^\s*])?)\*|\[([^\][]{1,500})\]\((https?:\/\/[^\s()]{1,500})\)/gs;
const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export function copyButton(text) {
  const button = element("button", "quiet", "Copy");
  button.type = "button";
  button.hidden = !navigator.clipboard; // browsers have none for pages over plain HTTP from elsewhere
  button.onclick = async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1200);
  };
  return button;
}

/** Shows a text that grows: blocks that have not changed keep their nodes, selection included. */
export class Markdown {
  constructor() {
    this.node = element("div", "markdown");
    this.blocks = [];
  }

  set(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && blocks[same] === this.blocks[same]) same++;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    this.node.append(...blocks.slice(same).map(render));
    this.blocks = blocks;
  }
}

/** Blocks as source: fences whole, the rest parted at blank lines and where a heading or list begins or ends. */
function split(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  let kind = null;
  const flush = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "")) {
        fence = null;
        flush();
      }
      continue;
    }
    const opening = FENCE.exec(line);
    const now = opening ? "fence" : /^#{1,6} /.test(line) ? "heading" : ITEM.test(line) ? "list" : line.trim() ? "text" : null;
    if (now === null || now === "fence" || now === "heading" || kind === "heading" || (now === "list" && kind === "text")) flush();
    if (opening) fence = opening[1];
    if (now !== null) lines.push(line);
    kind = kind === "list" && now === "text" ? "list" : now;
  }
  flush();
  return blocks;
}

function render(source) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = /^(#{1,6}) (.*)$/.exec(source);
  if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, "", inline(heading[2]));
  if (/^ {0,3}([-*_])( ?\1){2,}\s*$/.test(source)) return element("hr");
  if (ITEM.test(lines[0])) return list(lines);
  if (lines[0].startsWith(">")) return element("blockquote", "", inline(source.replace(/^> ?/gm, "")));
  if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return element("p", "", inline(source));
}

function code(lines, [, fence, language]) {
  const end = lines.length > 1 && lines.at(-1).trim().startsWith(fence) ? -1 : undefined;
  const text = lines.slice(1, end).join("\n");
  const bar = element("figcaption", "", element("span", "", language || "text"), copyButton(() => text));
  const pre = element("pre", "", element("code", "", text));
  pre.tabIndex = 0; // it scrolls
  return element("figure", "code", bar, pre);
}

function list(lines) {
  const top = element("div");
  const levels = [{ indent: -1, node: top }];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (!match) {
      levels.at(-1).node.lastChild?.append(" ", inline(line.trim()));
      continue;
    }
    const indent = match[1].length;
    while (levels.length > 2 && indent < levels.at(-1).indent) levels.pop();
    if (levels.length === 1 || (indent > levels.at(-1).indent + 1 && levels.length < 9)) {
      const node = element(match[2] ? "ol" : "ul");
      if (match[2]) node.start = Number(match[2]);
      (levels.at(-1).node.lastChild ?? top).append(node);
      levels.push({ indent, node });
    }
    levels.at(-1).node.append(element("li", "", inline(match[3])));
  }
  return top;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (tag) => (line) => element("tr", "", ...cells(line).map((cell) => element(tag, "", inline(cell.trim()))));
  const body = element("tbody", "", ...lines.slice(2).map(row("td")));
  return element("div", "scroll", element("table", "", element("thead", "", row("th")(lines[0])), body));
}

function inline(text) {
  const out = document.createDocumentFragment();
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , verbatim, bold, italic, label, url] = match;
    out.append(text.slice(last, match.index));
    last = match.index + whole.length;
    if (verbatim) out.append(element("code", "", verbatim));
    else if (bold) out.append(element("strong", "", inline(bold)));
    else if (italic) out.append(element("em", "", inline(italic)));
    else {
      const link = element("a", "", label);
      Object.assign(link, { href: url, target: "_blank", rel: "noopener noreferrer" });
      out.append(link);
    }
  }
  out.append(text.slice(last));
  return out;
}
