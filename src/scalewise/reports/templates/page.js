(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  for (const button of all("button.copy")) {
    button.onclick = async () => {
      const source = button.previousElementSibling;
      let copied = true;
      try {
        await navigator.clipboard.writeText(source.textContent);
      } catch {
        const range = document.createRange();
        range.selectNodeContents(source);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        copied = document.execCommand("copy");
      }
      button.textContent = copied ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy"), 1600);
    };
  }

  const table = document.getElementById("cmp");
  if (table) {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    const sort = (column, direction) => {
      const value = (row) => {
        const text = row.cells[column].dataset.v;
        return text === "" ? null : isNaN(text) ? text : Number(text);
      };
      const compare = (a, b) => {
        const left = value(a), right = value(b);
        if (left === null || right === null) return (left === null) - (right === null);
        return (left < right ? -1 : left > right ? 1 : 0) * direction;
      };
      [...body.rows].sort(compare).forEach((row) => body.append(row));
      headings.forEach((heading, index) => {
        if (index !== column) heading.removeAttribute("aria-sort");
        else heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      });
    };
    headings.forEach((heading, index) => {
      heading.firstElementChild.onclick = () => {
        const order = heading.getAttribute("aria-sort");
        const first = Number(heading.dataset.first || 1);
        sort(index, order === null ? first : order === "ascending" ? -1 : 1);
      };
    });
    document.getElementById("sortsel").onchange = (event) => {
      const [column, direction] = event.target.value.split(",").map(Number);
      sort(column, direction);
    };
  }

  const tip = document.getElementById("tip");
  addEventListener("pointermove", (event) => {
    const mark = event.target.closest && event.target.closest("[data-tip]");
    tip.style.opacity = mark ? 1 : 0;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 18}px`;
  });

  const closed = all("details").filter((element) => !element.open);
  addEventListener("beforeprint", () => closed.forEach((element) => (element.open = true)));
  addEventListener("afterprint", () => closed.forEach((element) => (element.open = false)));
})();
