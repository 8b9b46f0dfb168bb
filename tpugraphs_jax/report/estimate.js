// Flames: a click shows a part alone, Escape shows all.
document.querySelectorAll(".flame").forEach(flame => {
  const frames = [...flame.children], about = flame.nextElementSibling;
  const zoom = (left, width) => frames.forEach(frame => {
    const from = Math.max(left, +frame.dataset.left), to = Math.min(left + width, +frame.dataset.left + +frame.dataset.width);
    frame.hidden = to - from < 1e-9;
    frame.style.left = `${100 * (from - left) / width}%`;
    frame.style.width = `${100 * (to - from) / width}%`;
  });
  const tell = event => { if (event.target.title) about.textContent = event.target.title; };
  flame.addEventListener("click", event => {
    const frame = event.target.closest(".frame");
    if (frame) zoom(+frame.dataset.left, +frame.dataset.width);
  });
  flame.addEventListener("focusin", tell);
  flame.addEventListener("mouseover", tell);
  flame.addEventListener("keydown", event => { if (event.key == "Escape") zoom(0, 100); });
});

// Timelines of a device.
document.querySelectorAll("canvas.timeline").forEach(canvas => {
  const data = JSON.parse(document.getElementById(`timeline${canvas.dataset.step}`).textContent);
  const about = canvas.nextElementSibling, end = data.end, names = 96, row = 40;
  const colours = Object.fromEntries(data.colours.map(name => {
    const probe = document.createElement("span");
    probe.className = name;
    probe.hidden = true;
    document.body.append(probe);
    const colour = getComputedStyle(probe).backgroundColor;
    probe.remove();
    return [name, colour];
  }));
  let from = 0, to = end;
  const draw = () => {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d"), style = getComputedStyle(canvas);
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    const place = time => names + (time - from) / (to - from) * (width - names);
    data.tracks.forEach((track, number) => {
      const top = 4 + number * row;
      let last = -1;
      for (const [start, stop, label, colour] of track.events) {
        if (stop < from || start > to) continue;
        const left = Math.max(names, place(start)), right = Math.min(width, Math.max(place(stop), left + .5));
        if (right <= last) continue;  // nothing of it is seen
        context.fillStyle = colours[data.colours[colour]];
        context.fillRect(left, top, Math.max(.5, right - left), row - 8);
        last = right;
        if (right - left > 40) {
          context.save();
          context.beginPath();
          context.rect(left, top, right - left - 2, row - 8);
          context.clip();
          context.fillStyle = "#111";
          context.fillText(data.labels[label], left + 3, top + 20);
          context.restore();
        }
      }
      context.fillStyle = style.color;
      context.fillText(track.name, 2, top + 20);
    });
    context.fillStyle = style.color;
    const bottom = height - 8;
    for (let tick = 0; tick <= 4; tick++) {
      const time = from + (to - from) * tick / 4;
      context.textAlign = tick == 4 ? "right" : "left";
      context.fillText(`${Number(time.toPrecision(5))} ms`, place(time), bottom);
    }
    context.textAlign = "left";
  };
  const show = (start, length) => {
    length = Math.min(end, Math.max(length, end * 1e-6));
    from = Math.min(Math.max(0, start), end - length);
    to = from + length;
    draw();
  };
  const zoom = (factor, at) => show(at - (at - from) * factor, (to - from) * factor);
  const time = event => from + Math.max(0, event.offsetX - names) / (canvas.clientWidth - names) * (to - from);
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : .8, time(event));
  }, {passive: false});
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = time(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held !== null) { show(from + held - time(event), to - from); return; }
    const track = data.tracks[Math.floor((event.offsetY - 4) / row)], at = time(event);
    const found = track && track.events.find(([start, stop]) => start <= at && at <= stop);
    if (found) about.textContent = `${data.labels[found[2]]}: ${Number((found[1] - found[0]).toPrecision(4))} ms from ${Number(found[0].toPrecision(6))} ms`;
  });
  canvas.addEventListener("keydown", event => {
    const middle = (from + to) / 2, part = (to - from) / 5;
    const moves = {
      "+": () => zoom(.5, middle), "=": () => zoom(.5, middle), "-": () => zoom(2, middle), "0": () => show(0, end),
      ArrowLeft: () => show(from - part, to - from), ArrowRight: () => show(from + part, to - from),
    };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
});
