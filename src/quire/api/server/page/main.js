// Puts the page together, and looks at the server from time to time.
import { ApiError, get } from "./api.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { askForKey, startKey } from "./key.js";
import { Live } from "./live.js";
import { Replicas } from "./replicas.js";
import { offerModels, startSettings } from "./settings.js";
import { Stories } from "./stories.js";
import { startTheme } from "./theme.js";
import { Tiers } from "./tiers.js";

startTheme();
startSettings();
const replicas = new Replicas(lookElsewhere);
const ask = (path) => replicas.ask(path);
const tiers = new Tiers(ask);
const live = new Live();
const stories = new Stories((request) => tiers.light(request));
new Chat(askForKey);

let isBusy = false;
let version = 0;

/** Another replica is looked at: nothing of the one before is left. */
function lookElsewhere() {
  version = 0;
  stories.clear();
  tiers.clear();
  live.clear();
  wake();
}

async function lookAtReplicas() {
  const told = (await get("page/data/replicas")).replicas;
  replicas.show(told);
  if (!told.length) await sleep(3600_000); // there is one engine, and no more will come
}

async function lookAtLive() {
  const from = replicas.chosen;
  const state = await ask("page/data/live");
  if (from !== replicas.chosen) return;
  $("model").textContent = state.model;
  const { running, waiting, loading } = state.requests;
  isBusy = running + waiting + loading > 0;
  stories.seesAll = state.sees_all;
  live.show(state);
}

async function lookAtModels() {
  offerModels((await get("v1/models")).data.map((model) => model.id));
  await sleep(60_000); // adapters come and go, but seldom
}

async function lookAtBlocks() {
  const from = replicas.chosen;
  const blocks = await ask("page/data/blocks");
  if (from === replicas.chosen) tiers.show(blocks);
}

async function lookAtStories() {
  const from = replicas.chosen;
  const told = await ask(`page/data/journal?since=${version}`);
  if (from !== replicas.chosen) return;
  if (told.version < version) stories.clear(); // it was started anew, and so are its stories
  version = told.version < version ? 0 : told.version;
  stories.show(told.requests);
}

/** Look again and again: often while something happens, not at all while the page is hidden. */
async function watch(look, busyMs, idleMs) {
  for (;;) {
    let wait = isBusy ? busyMs : idleMs;
    if (!document.hidden) {
      try {
        await look();
      } catch (error) {
        wait = explain(error);
      }
    }
    await sleep(wait);
  }
}

const sleepers = new Set();
function sleep(milliseconds) {
  return new Promise((resolve) => {
    const wakeUp = () => {
      clearTimeout(timer);
      sleepers.delete(wakeUp);
      resolve();
    };
    const timer = setTimeout(wakeUp, milliseconds);
    sleepers.add(wakeUp);
  });
}
function wake() {
  for (const wakeUp of [...sleepers]) wakeUp();
}
document.addEventListener("visibilitychange", wake);

function explain(error) {
  const pulse = $("pulse");
  if (error.needsKey) {
    askForKey();
    return 3600_000; // until there is a key
  }
  if (error.status === 401) return 0; // another key has been given meanwhile
  if (!(error instanceof ApiError)) throw error;
  if (error.status !== 503) {
    pulse.ariaLive = "polite"; // this is news, unlike rates that change every second
    pulse.textContent = error.message;
    pulse.classList.add("lost");
  }
  return 2000;
}

startKey(wake);
for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const other of document.querySelectorAll(".views button")) {
      if (other === button) other.setAttribute("aria-current", "true");
      else other.removeAttribute("aria-current");
    }
  });
}

watch(lookAtReplicas, 1000, 2000);
watch(lookAtModels, 1000, 1000);
watch(lookAtLive, 1000, 1000);
watch(lookAtBlocks, 350, 1000);
watch(lookAtStories, 700, 1200);
