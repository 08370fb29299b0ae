"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.report.sample import Sample, number
from quire.bench.report.table import check_json_path, table, write_json
from quire.errors import ConfigError


def test_a_sample_shows_its_median_and_spread() -> None:
    sample = Sample([3.0, 1.0, 2.0])
    assert (sample.median, str(sample)) == (2.0, "2.00 (1.00 to 3.00)")
    assert str(Sample([24_047.4])) == "24,047"
    assert sample.map(lambda each: 1 / each).runs == (1 / 3, 1.0, 0.5)


@pytest.mark.parametrize(
    ("value", "text"), [(0.28, "0.280"), (3.54, "3.54"), (977.2, "977.2"), (36_048.3, "36,048")]
)
def test_numbers_have_the_digits_that_tell(value: float, text: str) -> None:
    assert number(value) == text


def test_columns_line_up() -> None:
    rows = [{"what": "a", "n": 1}, {"what": "long", "n": 1000, "more": Sample([1.0])}]
    assert table(rows).splitlines() == [
        "what      n  more",
        "----  -----  ----",
        "a         1",
        "long  1,000  1.00",
    ]


RESULT = {"rows": [{"ms": Sample([1.0, 3.0])}]}


class TestJson:
    def expect(self, text: str) -> None:
        ms = {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [1.0, 3.0]}
        assert json.loads(text) == {"rows": [{"ms": ms}]}

    def test_to_a_file(self, tmp_path: Path) -> None:
        write_json(str(tmp_path / "a.json"), RESULT)
        self.expect((tmp_path / "a.json").read_text())

    def test_to_standard_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        write_json("-", RESULT)
        self.expect(capsys.readouterr().out)

    def test_a_missing_folder_is_said_before_anything_is_measured(self, tmp_path: Path) -> None:
        check_json_path(str(tmp_path / "a.json"))
        with pytest.raises(ConfigError, match="a folder that does not exist"):
            check_json_path(str(tmp_path / "none" / "a.json"))

    def test_a_path_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be written"):
            write_json(str(tmp_path), RESULT)
