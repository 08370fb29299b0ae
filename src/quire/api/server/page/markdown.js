// Markdown as elements. Texts are always set as text: no HTML that a model writes becomes markup.
import { copyButton } from "./copy.js";
import { make } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// In this order: what stands in code is not looked at, and two stars are not one star twice.
const INLINE = new RegExp(
  [
    /(?<code>`+)(?<coded>.+?)\k<code>(?!`)/,
    /\[(?<label>[^\]\n]+)\]\((?<target>[^\s)]+)(?:\s+"[^"\n]*")?\)/,
    /(?<address>https?:\/\/[^\s<>)\]]+[^\s<>)\].,;:!?'"])/,
    /\*\*(?=\S)(?<strong>.+?\S??)\*\*/,
    /~~(?=\S)(?<struck>.+?)~~/,
    /(?<![\w*])\*(?=[^\s*])(?<stressed>[^*\n]*[^\s*])\*(?![\w*])/,
    /(?<![\w_])_(?=[^\s_])(?<slanted>[^_\n]*[^\s_])_(?![\w_])/,
  ].map((part) => part.source).join("|"),
  "s",
);

/** Shows a text that grows. Blocks that stay as they are keep their elements, and so a selection. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(text) {
    const sources = split(text);
    let same = 0;
    while (same < sources.length && sources[same] === this.shown[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const source of sources.slice(same)) this.element.append(block(source));
    this.shown = sources;
  }
}

/** The source of each block: fences, lists and paragraphs, which blank lines part. */
function split(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const end = () => {
    if (lines.some((line) => line.trim())) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      lines.push(line);
      if (mark?.startsWith(fence) && line.trim() === mark) {
        fence = null;
        end();
      }
    } else if (mark && !(isList(lines) && isInside(line))) {
      end();
      fence = mark;
      lines.push(line);
    } else if (line.trim() === "") {
      if (isList(lines)) lines.push(line); // a list goes on behind it, if another item comes
      else end();
    } else {
      if (begins(line, lines)) end();
      lines.push(line);
    }
  }
  end();
  return blocks;
}

const isInside = (line) => /^\s{2,}/.test(line); // of the item above it
const isNumbered = ([, , mark]) => /\d/.test(mark);
const isList = (lines) => lines.length > 0 && ITEM.test(lines[0]) && !RULE.test(lines[0]);

/** Whether a line belongs to another block than the lines before it. */
function begins(line, before) {
  if (before.length === 0) return false;
  const previous = before.at(-1);
  const item = ITEM.exec(line);
  if (isList(before) && item) return !isInside(line) && isNumbered(item) !== isNumbered(ITEM.exec(before[0]));
  if (isList(before)) return !isInside(line) && previous.trim() === "";
  if (HEADING.test(line) || RULE.test(line) || HEADING.test(previous) || RULE.test(previous)) return true;
  return item !== null || QUOTE.test(line) !== QUOTE.test(previous);
}

function block(source) {
  const lines = source.split("\n");
  const [first] = lines;
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence);
  if (RULE.test(first)) return make("hr");
  const heading = HEADING.exec(first);
  if (heading) return inline(make(`h${Math.min(6, heading[1].length + 2)}`), heading[2]); // the page has two above
  if (ITEM.test(first)) return list(lines);
  if (QUOTE.test(first)) return quote(lines);
  if (lines.length > 1 && first.includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return inline(make("p"), source);
}

function code(lines, [, mark, language]) {
  const ended = lines.length > 1 && lines.at(-1).trim() === mark;
  const text = lines.slice(1, ended ? -1 : undefined).join("\n");
  const head = make("div", { class: "code-head" }, make("span", { text: language }), copyButton("Copy code", () => text));
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", { text })));
}

function quote(lines) {
  const element = make("blockquote");
  new MarkdownView(element).show(lines.map((line) => line.replace(QUOTE, "")).join("\n"));
  return element;
}

/** Items that stand further in are a list of the item before them. */
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const number = Number.parseInt(mark, 10); // none of a bullet
  const element = Number.isNaN(number) ? make("ul") : make("ol", { start: number === 1 ? null : number });
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[3]]);
    else items.at(-1).push(line.slice(Math.min(indent.length + 2, line.length - line.trimStart().length)));
  }
  for (const item of items) {
    const child = make("li");
    new MarkdownView(child).show(item.join("\n"));
    const only = child.firstElementChild;
    if (only?.tagName === "P") only.replaceWith(...only.childNodes); // tight, as most lists are
    element.append(child);
  }
  return element;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, name) => make("tr", {}, ...cells(line).map((text) => inline(make(name), text)));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  const whole = make("table", {}, make("thead", {}, row(lines[0], "th")), body);
  return make("div", { class: "table", tabindex: "0" }, whole);
}

/** Put a text with its marks into an element. */
function inline(element, text) {
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    element.append(rest.slice(0, found.index), marked(found.groups, found[0]));
    rest = rest.slice(found.index + found[0].length);
  }
  element.append(rest);
  return element;
}

function marked(found, whole) {
  if (found.coded !== undefined) return make("code", { text: found.coded.trim() || found.coded });
  if (found.strong !== undefined) return inline(make("strong"), found.strong);
  if (found.struck !== undefined) return inline(make("del"), found.struck);
  if (found.address !== undefined) return link(found.address, make("span", { text: found.address }));
  if (found.target !== undefined) return link(found.target, inline(make("span"), found.label)) ?? whole;
  return inline(make("em"), found.stressed ?? found.slanted);
}

/** Only addresses that leave the page: a model must not write scripts into links. */
function link(href, content) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return null;
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...content.childNodes);
}
