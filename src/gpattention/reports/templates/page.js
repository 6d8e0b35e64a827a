"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();

  for (const list of document.querySelectorAll('[role="tablist"]')) {
    const all = [...list.querySelectorAll('[role="tab"]')];
    const choose = (chosen, focus) => {
      for (const tab of all) {
        const selected = tab === chosen;
        tab.setAttribute("aria-selected", String(selected));
        tab.tabIndex = selected ? 0 : -1;
        document.getElementById(tab.getAttribute("aria-controls")).hidden = !selected;
      }
      if (focus) chosen.focus();
    };
    list.addEventListener("click", (event) => {
      const tab = event.target.closest('[role="tab"]');
      if (tab) choose(tab, false);
    });
    list.addEventListener("keydown", (event) => {
      const last = all.length - 1;
      const at = all.indexOf(document.activeElement);
      const next = {
        ArrowRight: at === last ? 0 : at + 1,
        ArrowLeft: at === 0 ? last : at - 1,
        Home: 0,
        End: last,
      }[event.key];
      if (next === undefined || at < 0) return;
      event.preventDefault();
      choose(all[next], true);
    });
    choose(all[0], false);
  }

  for (const ladder of document.querySelectorAll(".ladder")) {
    const input = ladder.querySelector("input");
    const frames = [...ladder.querySelectorAll(".frame")];
    const choose = () => {
      frames.forEach((frame, i) => (frame.hidden = i !== Number(input.value)));
      const title = frames[input.value].dataset.title;
      ladder.querySelector("output").textContent = title;
      input.setAttribute("aria-valuetext", title);
    };
    input.addEventListener("input", choose);
    choose();
  }

  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-10% 0px -80% 0px" },
  );
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
})();
