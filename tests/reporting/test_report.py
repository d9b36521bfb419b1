"""The report: every cell of the paper, no number without a command, and pages that stand alone."""

from html.parser import HTMLParser
from pathlib import Path
import re
import shlex

import made_up_results
import pytest

from damcha_jax.config import ConfigError
from experiments import claims
from experiments import command_line
from experiments import common
from experiments import document
from experiments import paper_tables
from experiments import questions
from experiments import report
from experiments.paper_claims import CLAIMS
from experiments.results import ResultsError, read_results

ROOT = common.PAPER.parents[1]
PAPER = paper_tables.read_paper()
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


@pytest.fixture
def results(tmp_path):
  """Mix at the paper's size with a figure, enwik8 at a smaller one."""
  folder = made_up_results.write(tmp_path, "gpt2_enwik8", "mix:paper", [
      made_up_results.table5("mha", 1.2), made_up_results.table5("damcha", 1.125)])
  (folder / "figures").mkdir()
  (folder / "figures" / "validation.svg").write_text(SVG)
  made_up_results.write(tmp_path, "gpt2_enwik8", "enwik8:cpu", [
      made_up_results.table5("mha", 1.5, comparable=False, dataset="sample_text")],
                        seeds=[3, 4], num_steps=7)
  return read_results(tmp_path)


def _report(results):
  return report.report(results, claims.judge(CLAIMS, results, PAPER),
                       questions.blocks(results, PAPER))


def _blocks(blocks, kind):
  for block in blocks:
    if isinstance(block, document.Folded):
      yield from _blocks(block.blocks, kind)
    elif isinstance(block, kind):
      yield block


class _Page(HTMLParser):
  """What a test asks of a page."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.open = [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in ("meta", "img"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def test_every_figure_of_the_paper_is_there(results):
  text = "\n".join("|".join(row) for table in _blocks(_report(results), document.Table)
                   for row in table.rows)
  figures = {figure for _, figure in paper_tables.leaves(PAPER)}
  cells = set(re.split(r"[|\n]", text))
  assert {figure for figure in figures if str(figure) not in cells} == set()
  titles = [block.text for block in _blocks(_report(results), document.Heading)]
  for number in range(1, 8):
    assert any(title.startswith(f"Table {number}:") for title in titles)


def test_every_cell_is_filled_or_names_what_would_fill_it(results):
  found = paper_tables.locate(results)
  for name in paper_tables.TABLES:
    for part in paper_tables.parts(name, PAPER):
      tables = list(_blocks(report._part(part, found), document.Table))
      told = sum(len([cell for cell in row[1:] if cell]) for table in tables
                 if "not run here" in table.caption for row in table.rows)
      filled = {cell.path for cell in part.cells if cell.path in found}
      assert told + len(filled) == len(part.cells)
      assert all(table.commands == (part.command,) for table in tables
                 if "not run here" in table.caption)


def test_ours_stands_beside_the_papers(results):
  (table,) = [table for table in _blocks(_report(results), document.Table)
              if "`mix:paper` (" in table.caption]
  (line,) = [row for row in table.rows if row[0] == "DAMCHA"]
  assert line == ("DAMCHA", "cross entropy (nats per character)", "1.125", "0.01", "0, 1", "1.04", "+0.085 (+8.2%)",
                  "yes", "–")
  assert table.commands == ("python -m experiments.gpt2_enwik8 --config=configs/mix.py",)


def _tables(tmp_path, name, part, experiment, config, rows):
  """Of one part of a table, folded ones besides."""
  made_up_results.write(tmp_path, experiment, config, rows)
  results = read_results(tmp_path)
  (one,) = [one for one in paper_tables.parts(name, PAPER) if one.title == part]
  blocks = list(report._part(one, paper_tables.locate(results)))
  return (list(_blocks(blocks, document.Table)),
          [block for block in blocks if isinstance(block, document.Folded)])


def test_no_difference_is_shown_of_what_cannot_be_compared(results):
  (table,) = [table for table in _blocks(_report(results), document.Table)
              if "`enwik8:cpu` (" in table.caption]
  (line,) = table.rows
  assert line[5:8] == ("1.07", "–", "no")


def _memory(attention, note):
  return made_up_results.row(attention, "peak_memory", 3.0, dataset="wmt14", note=note, unit="MiB")


def test_equal_notes_are_told_once(tmp_path):
  rows = [_memory("authors_tha", "long one"), _memory("damcha", "long one"),
          _memory("authors_moa", "another")]
  (table, _), _ = _tables(tmp_path, "table2", "WMT", "efficiency", "table2:paper", rows)
  assert [(line[0], line[-1]) for line in table.rows] == [
      ("THA (`authors_tha`)", "[1]"), ("MoA (`authors_moa`)", "[2]"), ("DAMCHA", "[1]")]
  assert table.notes == ("long one", "another")
  for text in (document.to_html("T", [table]), document.to_markdown("T", [table], Path())):
    assert text.count("long one") == 1 and "[2] another" in text
  (all_rows,) = _blocks(report._all_rows(read_results(tmp_path)), document.Table)
  assert all_rows.notes == ("long one", "another")


@pytest.mark.parametrize(("text", "html"), [
    ("**Not so (`a<b`, twice).** Why", "<strong>Not so (<code>a&lt;b</code>, twice).</strong> Why"),
    ("`a**b` and `c**d`", "<code>a**b</code> and <code>c**d</code>"),
    ("2 ** 3", "2 ** 3"),
])
def test_bold_words_may_hold_code_and_code_stars(text, html):
  assert f"<p>{html}</p>" in document.to_html("T", [document.Paragraph(text)])


def _image(attention, metric, value, **fields):
  return made_up_results.row(attention, metric, value, dataset="sample_images", paper=1.0, **fields)


def test_a_set_that_was_run_has_no_second_table_of_the_same_cells(tmp_path):
  rows = [_image("mha", "fid_top50", None, note="no weights"), _image("mha", "fid_group_mean", 2.0)]
  (ours, rest), (folded,) = _tables(tmp_path, "table1", "CIFAR-10", "image_generation",
                                    "cifar10:smoke", rows)
  assert [line[:3] for line in ours.rows] == [("MHA", "FID mean", "2"),
                                              ("MHA", "FID Top-50", "not available")]
  (mha,) = [line for line in rest.rows if line[0] == "MHA"]
  assert not {"358.857", "91.432"} & set(mha) and folded.blocks == (rest,)
  assert "no evidence" in ours.caption


def test_both_readings_of_an_attention_are_shown_and_named(tmp_path):
  rows = [_image(name, "mse_unpaired_mean", 0.3, comparable=True)
          for name in ("tha", "authors_tha")]
  rows[0]["note"] = "left out 3; the paper measured authors_tha"  # as training writes it
  (table, _), _ = _tables(tmp_path, "table1", "CIFAR-100", "image_generation", "cifar100:paper",
                          rows)
  assert [(line[0], line[7]) for line in table.rows] == [
      ("THA (`tha`)", "no"), ("THA (`authors_tha`)", "yes")]
  assert table.notes == ("the paper measured authors_tha; left out 3",)


@pytest.mark.parametrize("config, other", [("cifar10", "CIFAR-100"), ("cifar100", "CIFAR-10")])
def test_two_sets_on_one_sample_are_said_to_be_one_experiment(tmp_path, config, other):
  part = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[config]
  (table, _), _ = _tables(tmp_path, "table4", part, "ablations", "table4:cpu", [_image(
      "damcha", "fid_top50", 3.0, variant="static", section=config)])
  assert f"stands for {other} as well" in table.caption and "same experiment" in table.caption
  assert table.rows[0][:3] == ("w/o f(x)+share", "FID Top-50", "3")


@pytest.mark.parametrize("name, part, columns", [
    ("table2", "WMT", ("memory (unit not given)", "GFLOPs", "latency (ms)")),
    ("table3", "CIFAR-10", ("FID mean", "FID Top-50")),
    ("table3", "WMT", ("BARTScore mean", "BARTScore Top-50")),
    ("table4", "CIFAR-100", ("FID mean", "FID Top-50")),
    ("table4", "CommonGen", ("BARTScore mean", "BARTScore Top-50")),
    ("table5", "Mix", ("cross entropy (nats per character)", "perplexity")),
    ("table6", "ViT-S/16", ("Top-1 epoch 100 (%)", "Top-1 epoch 500 (%)", "Top-5 epoch 100 (%)",
                            "Top-5 epoch 500 (%)")),
])
def test_columns_say_what_is_measured_in_which_unit_and_order(name, part, columns):
  (one,) = [one for one in paper_tables.parts(name, PAPER) if one.title == part]
  _, table = report._part(one, {})
  assert set(table.header[1:]) == set(columns)
  if name != "table6":
    assert table.header[1:] == columns
  assert not any("1 layers" in line[0] for line in table.rows)


@pytest.mark.parametrize("unit, text", [
    ("1", "0.5"), ("0 .. 100", "0.5 of 100"), ("squared error of the range",
                                               "0.5 of the squared range"), ("ms", "0.5 ms")])
def test_a_unit_reads_behind_its_number(unit, text):
  assert report._value(made_up_results.row("mha", "metric", 0.5, unit=unit)) == text


def test_no_number_lacks_a_command(results):
  blocks = _report(results)
  commanded = list(_blocks(blocks, (document.Table, document.Figure)))
  assert len(commanded) > 20
  for block in commanded:
    assert block.commands, block.caption
    for command in block.commands:
      assert command in document.to_markdown("", [block], Path())
  verdicts = claims.as_blocks(claims.judge(CLAIMS, results, PAPER))
  rest = [block for block in blocks if block not in verdicts]
  assert len(rest) == len(blocks) - len(verdicts)
  for paragraph in _blocks(rest, document.Paragraph):
    assert not re.search(r"\d", paragraph.text)


def test_every_verdict_is_followed_by_commands():
  blocks = claims.as_blocks(claims.judge(CLAIMS, read_results(ROOT / "results"), PAPER))
  verdicts = [index for index, block in enumerate(blocks) if isinstance(block, document.Heading)]
  assert len(verdicts) == len(CLAIMS)
  for index in verdicts:
    code = blocks[index + 3]
    assert isinstance(code, document.Code) and code.lines


def _commands():
  texts = [part.command for name in paper_tables.TABLES
           for part in paper_tables.parts(name, PAPER)]
  return sorted({*texts, *(command for claim in CLAIMS for command in claim.commands)})


@pytest.mark.parametrize("command", [one for one in _commands() if " --config=" in one])
def test_commands_that_are_proposed_parse(command, monkeypatch):
  monkeypatch.chdir(ROOT)
  _, _, module, *arguments = shlex.split(command)
  assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
  command_line.parse([module, *arguments])


def test_values_that_differ_from_the_config_file_are_in_the_command(results, monkeypatch):
  (small,) = [result for result in results if result.config == "enwik8:cpu"]
  assert small.command == ("python -m experiments.gpt2_enwik8 --config=configs/enwik8.py:cpu "
                           "--config.num_steps=7 --config.seeds=3,4")
  monkeypatch.chdir(ROOT)
  config, _ = command_line.parse(shlex.split(small.command)[2:])
  assert config.seeds == (3, 4) and config.num_steps == 7


def test_the_page_stands_alone_and_can_be_read_aloud(results):
  text = document.to_html("Title <1>", _report(results))
  page = _Page(text)
  assert page.open == []
  for tag, attributes in page.tags:
    assert not {"src", "href"} & set(attributes) or re.match("#|data:image/", attributes.get(
        "src", attributes.get("href")))
    if tag == "img":
      assert attributes["alt"]
  assert "@import" not in text and "url(" not in text and "<script" not in text
  names = [tag for tag, _ in page.tags]
  assert names.count("table") == names.count("caption") > 20 and names.count("img") == 1
  anchors = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
  links = [attributes["href"][1:] for tag, attributes in page.tags if tag == "a"]
  assert len(links) > 8 and set(links) <= anchors
  assert "Title &lt;1&gt;" in text and "Title <1>" not in text


def test_markdown_keeps_what_is_special_to_it():
  table = document.Table("a_b", ("run it",), ("x|y", "M*_c"), (("`a_b|c`", "<1"),))
  text = document.to_markdown("T", [table], Path())
  assert "a\\_b `run it`" in text and "| x\\|y | M\\*\\_c |" in text
  assert "| `a_b\\|c` | \\<1 |" in text
  text = document.to_markdown("T", [document.Paragraph("[1] [x](javascript:alert(1))")], Path())
  assert "[1] [x]\\(javascript:alert(1))" in text


@pytest.mark.parametrize("variant, told", [("epoch4", "Top-1 (here epoch4)"), ("epoch100", "Top-1")])
def test_an_epoch_that_stands_for_the_papers_is_told(variant, told):
  cell = paper_tables.Cell(("table6", "MHA", "top1_epoch100"), 69.02, "MHA", "Top-1")
  assert report._quantity(cell, made_up_results.row("mha", "top1", 1.0, variant=variant)) == told


def test_a_line_of_formats_is_one_figure(tmp_path):
  folder = made_up_results.write(tmp_path, "gpt2_enwik8", "mix:cpu", [])
  for name in ("a.svg", "a.png", "inner/b.png"):
    path = folder / "figures" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SVG)
  (result,) = read_results(tmp_path)
  assert [path.name for path in result.figures] == ["a.svg", "b.png"]


def test_options_are_checked():
  with pytest.raises(ConfigError, match="--out is missing"):
    report.parse(["report"])
  with pytest.raises(ConfigError, match="--out is missing"):
    report.parse(["report", "--out="])
  with pytest.raises(ConfigError, match="is no UTF-8; rename"):
    report.parse(["report", "--out=\udcff"])
  with pytest.raises(ResultsError, match="is no folder"):
    read_results(Path("nowhere"))


@pytest.mark.parametrize("pages", [
    ["--claims=x.md", "--study=x.md"], ["--study=out/claims.md"], ["--claims=out/../out/index.html"]])
def test_pages_do_not_overwrite_each_other(pages):
  with pytest.raises(ConfigError, match="must name two files"):
    report.parse(["report", "--out=out", *pages])


def test_all_files_are_written(tmp_path, results):
  root = results[0].folder.parent
  report.main(["report", f"--results={root}", f"--out={tmp_path / 'out'}",
               f"--claims={tmp_path / 'claims.md'}", f"--study={tmp_path / 'new' / 'study.md'}"])
  out = tmp_path / "out"
  assert {path.name for path in out.iterdir()} == {"index.html", "report.md", "claims.md",
                                                   "study.md"}
  assert (tmp_path / "claims.md").read_text() == (out / "claims.md").read_text()
  assert (tmp_path / "new" / "study.md").read_text() == (out / "study.md").read_text()
  link = re.search(r"!\[.*\]\((.*)\)", (out / "report.md").read_text())[1]
  assert (out / link).is_file()


def test_claims_and_answers_in_the_docs_are_those_of_the_results():
  results = read_results(ROOT / "results")
  judged = claims.judge(CLAIMS, results, PAPER)
  answers = questions.blocks(results, PAPER)
  docs = ROOT / "docs"
  for name, page in {"claims": report.claims_page(judged),
                     "study": report.study_page(answers, docs)}.items():
    assert (docs / f"{name}.md").read_text(encoding="utf-8") == page, (
        f"docs/{name}.md is out of date; run {claims.REPORT} --{name}=docs/{name}.md")
