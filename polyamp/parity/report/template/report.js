"use strict";
for (const tools of document.querySelectorAll(".tools")) {
  const table = document.getElementById(tools.dataset.of);
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const [text, phase, only] = tools.querySelectorAll("input, select");
  const status = tools.querySelector("[role=status]");
  const said = (count) => count.toLocaleString("en");

  const filter = () => {
    const wanted = text.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = (!phase.value || row.cells[2].textContent.trim() === phase.value)
        && (!only.checked || row.classList.contains("d"))
        && (!wanted || (row.cells[1].textContent + " " + row.cells[7].textContent).toLowerCase().includes(wanted));
      row.hidden = !fits;
      shown += fits;
    }
    status.textContent = shown === rows.length ? said(shown) + " lines" : said(shown) + " of " + said(rows.length) + " lines";
  };

  const value = (row, column, numeric) => {
    const cell = row.cells[column].textContent.trim();
    if (!numeric) return cell.toLowerCase();
    const number = parseFloat(cell);
    return Number.isNaN(number) ? Infinity : number;  // "not finite" is beyond every number
  };

  const sort = (head, column) => {
    const numeric = "n" in head.dataset;
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric && column > 0;
    for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = rows.map((row, index) => ({ row, index, key: value(row, column, numeric) }));
    order.sort((a, b) => {
      const way = a.key < b.key ? -1 : a.key > b.key ? 1 : 0;
      return (down ? -way : way) || a.index - b.index;
    });
    body.append(...order.map((each) => each.row));
  };

  Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, column));
    head.append(button);
  });
  for (const control of [text, phase, only]) control.addEventListener("input", filter);
  tools.hidden = false;
  filter();
}
