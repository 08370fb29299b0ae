// Asks for an API key where the server wants one.
import { key, setKey } from "./api.js";
import { $ } from "./dom.js";

export function startKey(onKey) {
  $("key-button").addEventListener("click", () => askForKey());
  $("key-dialog").addEventListener("close", () => {
    const value = $("key").value.trim();
    if (!value) return;
    setKey(value);
    $("key").value = "";
    onKey();
  });
}

export function askForKey() {
  $("key-button").hidden = false;
  if ($("key-dialog").open) return;
  $("key-error").textContent = key() ? "That key is not known here." : "";
  $("key-dialog").showModal();
  $("key").focus();
}
