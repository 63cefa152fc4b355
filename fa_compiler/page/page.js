const form = document.getElementById("filter");
if (form) {
  const value = (id) => document.getElementById(id)?.value ?? "";
  const apply = () => {
    const words = value("words").toLowerCase(), status = value("status"), code = value("code");
    let shown = 0;
    for (const kind of document.querySelectorAll(".kind")) {
      const fits = (!status || kind.dataset.status === status) && (!code || kind.dataset.code === code) &&
        (!words || kind.dataset.words.includes(words) || kind.textContent.toLowerCase().includes(words));
      kind.hidden = !fits;
      shown += fits;
    }
    document.getElementById("none").hidden = shown > 0;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
}

const closed = [];
addEventListener("beforeprint", () => {
  closed.push(...document.querySelectorAll(".kind:not([open])"));
  for (const kind of closed) kind.open = true;
});
addEventListener("afterprint", () => { for (const kind of closed.splice(0)) kind.open = false; });

const WHOLE = 0.7, READABLE = 0.8;  // of the size in which text is drawn
for (const figure of document.querySelectorAll("figure")) {
  const view = figure.querySelector(".view"), drawing = view.querySelector("svg");
  const full = { width: drawing.width.baseVal.value, height: drawing.height.baseVal.value };
  const part = figure.querySelector(".part");
  let scale = 1, x = 0, y = 0;
  const move = () => {
    drawing.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
    part.hidden = x > -1 && y > -1 && x + full.width * scale < view.clientWidth + 1 &&
      y + full.height * scale < view.clientHeight + 1;
  };
  const tall = (size) => Math.min(760, Math.max(160, Math.ceil(full.height * size)));
  const fit = () => {
    view.style.height = `${tall(Math.min(1, view.clientWidth / full.width))}px`;
    scale = Math.min(1, view.clientWidth / full.width, view.clientHeight / full.height);
    x = (view.clientWidth - full.width * scale) / 2;
    y = 0;
    move();
  };
  const focus = drawing.querySelector(".focus rect");
  const open = () => {  // the whole, if its text can be read then; else the part around the softmax
    if (!view.clientWidth) return;
    fit();
    if (scale >= WHOLE || !focus) return;
    scale = Math.max(READABLE, Math.min(1, view.clientWidth / full.width));
    view.style.height = `${Math.min(innerHeight * 0.8, tall(scale))}px`;
    const box = focus.getBBox();
    const within = (start, length, room) => Math.min(0, Math.max(room - length * scale, start));
    const free = view.clientWidth - full.width * scale;
    x = free > 0 ? free / 2 : within(view.clientWidth / 2 - (box.x + box.width / 2) * scale, full.width, view.clientWidth);
    y = within(view.clientHeight / 2 - (box.y + box.height / 2) * scale, full.height, view.clientHeight);
    move();
  };
  const zoom = (factor, left, top) => {
    const next = Math.min(4, Math.max(0.05, scale * factor));
    x = left - (left - x) * next / scale;
    y = top - (top - y) * next / scale;
    scale = next;
    move();
  };
  let width = view.clientWidth;
  open();
  new ResizeObserver(() => {
    if (view.clientWidth === width) return;
    width = view.clientWidth;
    requestAnimationFrame(open);
  }).observe(view);
  const isActive = () => document.activeElement === view;  // else wheel and finger scroll the page, and do not stick here
  view.addEventListener("wheel", (event) => {
    if (!isActive() && !event.ctrlKey) return;
    event.preventDefault();
    const place = view.getBoundingClientRect();
    zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX - place.left, event.clientY - place.top);
  }, { passive: false });
  let wasActive = false;
  view.addEventListener("click", (event) => {  // a tap takes hold of the drawing, and the next one lets go
    if (event.pointerType === "touch" && wasActive) view.blur(); else view.focus({ preventScroll: true });
  });
  const isDrag = (event) => event.buttons && (isActive() || event.pointerType !== "touch");
  view.addEventListener("pointerdown", (event) => {
    wasActive = isActive();
    if (isDrag(event)) { view.setPointerCapture(event.pointerId); view.style.cursor = "grabbing"; }
  });
  view.addEventListener("pointermove", (event) => {
    if (isDrag(event)) { x += event.movementX; y += event.movementY; move(); }
  });
  view.addEventListener("pointerup", () => { view.style.cursor = ""; });
  view.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] };
    if (event.key in steps) { x += steps[event.key][0]; y += steps[event.key][1]; move(); }
    else if (event.key === "+" || event.key === "=") zoom(1.25, view.clientWidth / 2, view.clientHeight / 2);
    else if (event.key === "-") zoom(0.8, view.clientWidth / 2, view.clientHeight / 2);
    else if (event.key === "0") fit();
    else return;
    event.preventDefault();
  });
  for (const button of figure.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const factor = Number(button.dataset.zoom);
      if (factor) zoom(factor, view.clientWidth / 2, view.clientHeight / 2); else fit();
    });
  }
}
