const key = text => {
  const number = parseFloat(text.replaceAll(",", "").replace("< ", ""));
  return isNaN(number) ? text : number;
};
const sortBy = head => {
  const table = head.closest("table"), heads = [...head.parentNode.children], column = heads.indexOf(head);
  const sign = head.ariaSort == "ascending" ? -1 : 1;
  heads.forEach(other => { other.ariaSort = "none"; });
  head.ariaSort = sign == 1 ? "ascending" : "descending";
  const rows = [...table.tBodies[0].rows].map(row => [key(row.children[column].textContent.trim()), row]);
  const compare = ([a], [b]) => typeof a != typeof b ? (typeof a == "number" ? -1 : 1) : sign * (a < b ? -1 : a > b ? 1 : 0);
  table.tBodies[0].replaceChildren(...rows.sort(compare).map(([, row]) => row));
};
document.querySelectorAll("th").forEach(head => {
  head.addEventListener("click", () => sortBy(head));
  head.addEventListener("keydown", event => {
    if (event.key == "Enter" || event.key == " ") { event.preventDefault(); sortBy(head); }
  });
});
