// Elements in one line. Texts are always set as text: nothing a model says becomes markup.

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (attribute === "text") element.textContent = value;
    else if (attribute.startsWith("on")) element.addEventListener(attribute.slice(2), value);
    else if (value === true) element.setAttribute(attribute, "");
    else if (value !== false && value != null) element.setAttribute(attribute, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Whether fingers point here, and not a mouse: hints then say so. */
export const isTouched = matchMedia("(hover: none) and (pointer: coarse)");

export const $ = (id) => document.getElementById(id);

const grouped = new Intl.NumberFormat("en-US");
export const count = (number) => grouped.format(number);

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** Seconds, as short as they can be said; a number and its unit stay on one line. */
export function seconds(value) {
  if (value < 0.00005) return "0\u00a0ms";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)}\u00a0ms`;
  if (Number.isInteger(value) && value < 60) return `${value}\u00a0s`;
  if (value < 60) return `${value.toFixed(value < 9.95 ? 2 : 1)}\u00a0s`;
  return `${Math.floor(value / 60)}\u00a0min ${Math.round(value % 60)}\u00a0s`;
}

export function perSecond(value) {
  return value < 9.95 ? value.toFixed(1) : count(Math.round(value));
}
