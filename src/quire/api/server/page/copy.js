// A button that puts a text on the clipboard, and says so.
import { $, make } from "./dom.js";

const SAID_MS = 1600;

export function copyButton(name, text) {
  const button = make("button", { type: "button", class: "action", "aria-label": name, title: name, text: "Copy" });
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.textContent = copied ? "Copied" : "Not copied";
    $("said").textContent = button.textContent;
    setTimeout(() => {
      button.textContent = "Copy";
      $("said").textContent = "";
    }, SAID_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // over plain HTTP from another machine there is no clipboard
  }
}

function copyBySelection(text) {
  const area = make("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
