// The shell: navigation, theme, key, state of the connection. Pages are loaded when they are opened.

import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { CHAT, info, key, keyName, needsKey, onKey, setKey } from "console/api.js";
import { feed } from "console/events.js";
import { Dialog, Empty, Field, Notice, html, icons } from "console/ui.js";

const PAGES = {
  chat: { title: "Chat", load: () => import("console/pages/chat.js") },
  live: { title: "Live", topics: ["metrics"], load: () => import("console/pages/live.js") },
  requests: { title: "Requests", topics: ["requests"], load: () => import("console/pages/requests.js") },
  fleet: { title: "Fleet", topics: ["fleet"], load: () => import("console/pages/fleet.js") },
  keys: { title: "Keys", load: () => import("console/pages/keys.js") },
  spend: { title: "Spend", load: () => import("console/pages/spend.js") },
  lab: { title: "Lab", load: () => import("console/pages/lab.js") },
};

const opened = () => {
  const name = location.hash.replace(/^#\/?/, "").split("/")[0];
  return info.pages.includes(name) ? name : info.pages[0];
};

function useHeard(name, initial) {
  const [value, setValue] = useState(initial);
  useEffect(() => feed.on(name, setValue), [name]);
  return value;
}

function theme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function ThemeButton() {
  const [now, setNow] = useState(theme());
  const other = now === "dark" ? "light" : "dark";
  const change = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("ridgeline.theme", other);
    } catch {}
    dispatchEvent(new Event("themechange"));
    setNow(other);
  };
  return html`<button type="button" class="quiet square" aria-label=${`Use the ${other} theme`} title=${`Use the ${other} theme`} onClick=${change}>${now === "dark" ? icons.sun : icons.moon}</button>`;
}

const STATES = { live: "Connected", connecting: "Connecting", lost: "Not connected", paused: "Paused", key: "Key needed" };

function Connection() {
  const status = useHeard("status", feed.status);
  const name = STATES[status.state];
  return html`<span class="connection" data-state=${status.state} role="status" title=${status.why || name}><i></i><span>${name}</span></span>`;
}

function KeyDialog({ which, onClose }) {
  const input = useRef();
  const save = (event) => {
    event.preventDefault();
    setKey(input.current.value.trim(), which);
    onClose();
  };
  return html`<${Dialog} title=${keyName(which)} onClose=${onClose}>
    <form onSubmit=${save}>
      <p class="faint">${which === "host" ? "" : "Chat is a client of the gateway like any other: it needs a key from Keys, with its limits and budget. "}The key stays in this tab and is sent to this host alone. Closing the tab forgets it.</p>
      <${Field} label=${keyName(which)}><input ref=${input} type="password" autocomplete="off" spellcheck="false" autofocus /><//>
      <div class="actions">
        ${key(which) && html`<button type="button" class="quiet" onClick=${() => (setKey("", which), onClose())}>Forget the key</button>`}
        <button class="primary">Use this key</button>
      </div>
    </form>
  <//>`;
}

function Navigation({ page }) {
  return html`<nav class="pages" aria-label="Pages">
    ${info.pages.map((name) => html`<a href=${`#/${name}`} aria-current=${name === page ? "page" : null}>${icons[name]}<span>${PAGES[name].title}</span></a>`)}
  </nav>`;
}

function App() {
  const [page, setPage] = useState(opened());
  const [body, setBody] = useState({});
  const [failed, setFailed] = useState("");
  const [asksKey, setAsksKey] = useState(() => [opened() === "chat" ? CHAT : "host"].find(needsKey) ?? "");
  const [keyTurn, setKeyTurn] = useState(0);
  const status = useHeard("status", feed.status);
  const which = page === "chat" ? CHAT : "host";
  const isLocked = needsKey("host") && page !== "chat";

  useEffect(() => {
    const change = () => setPage(opened());
    change(); // the address may have changed since the first rendering
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  useEffect(() => onKey(() => setKeyTurn((turn) => turn + 1)), []);
  useEffect(() => scrollTo(0, 0), [page]);
  useEffect(() => {
    let current = true;
    document.title = `${PAGES[page].title} · ridgeline`;
    feed.want(info.kind === "fleet" ? "fleet" : "metrics", ...(PAGES[page].topics ?? []));
    PAGES[page].load().then(
      (module) => current && (setFailed(""), setBody({ page, Page: module.default })),
      () => current && setFailed("This page could not be loaded: the server cannot be reached."),
    );
    return () => (current = false);
  }, [page]);

  return html`<a class="skip" href="#main" onClick=${(event) => (event.preventDefault(), document.getElementById("main").focus())}>Skip to content</a>
    <div class="shell">
      <header class="side">
        <a class="brand" href=${`#/${info.pages[0]}`}><svg viewBox="0 0 32 32" aria-hidden="true"><path d="M3 25 12 11l4.5 7L22 8l7 17" /></svg>ridgeline</a>
        <${Navigation} page=${page} />
        <div class="side-end">
          ${info.events && html`<${Connection} />`}
          <div class="side-tools">
            <button type="button" class="quiet square" aria-label=${keyName(which)} title=${keyName(which)} data-on=${!!key(which)} onClick=${() => setAsksKey(which)}>${icons.lock}</button>
            <${ThemeButton} />
          </div>
          <small class="faint">${info.kind} ${info.version}</small>
        </div>
      </header>
      <main id="main" tabindex="-1" data-page=${page}>
        ${status.state === "lost" && html`<${Notice} tone="alarm"><strong>Not connected:</strong> ${status.why}. What is shown is from before; the page reconnects by itself.<//>`}
        ${isLocked ? html`<div class="view"><h1>${PAGES[page].title}</h1><${Empty} title=${`${info.key_name} needed`} icon=${icons.lock} actions=${html`<button type="button" class="primary" onClick=${() => setAsksKey("host")}>Enter the key</button>`}>What this page shows is for operators.<//></div>` : failed ? html`<${Notice} tone="alarm">${failed}<//>` : body.page === page ? html`<${body.Page} key=${`${page}${keyTurn}`} askKey=${() => setAsksKey(which)} />` : html`<div class="view"><div class="toolbar"><h1>${PAGES[page].title}</h1></div></div>`}
      </main>
    </div>
    ${asksKey && html`<${KeyDialog} which=${asksKey} onClose=${() => setAsksKey("")} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
