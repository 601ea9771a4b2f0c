"""Goal: ``make mutants`` can try every fault that is listed, and tells truly who noticed."""

from pathlib import Path

import pytest

from tests.mutants import run


@pytest.mark.parametrize("mutant", run.mutants(), ids=str)
def test_the_text_of_every_mutant_is_where_it_is_said_to_be(mutant: run.Mutant):
    place = run.locate(mutant)

    assert mutant.fault != mutant.text
    assert mutant.tests
    for test in mutant.tests:
        assert (run.ROOT / test.partition("::")[0]).exists()
    assert place.path.is_relative_to(run.ROOT)


def test_a_text_that_is_there_twice_or_not_at_all_is_refused():
    mutant = run.mutants()[0]

    with pytest.raises(LookupError):
        run.locate(mutant._replace(text="no such text"))
    with pytest.raises(LookupError):
        run.locate(mutant._replace(function="Nobody.at_all"))


def test_a_fault_is_noticed_by_a_test_that_fails_and_by_no_other(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert open('what').read() == 'a'\n")
    mutant = run.Mutant("f", "a", "b", ("test_it.py",))
    (tmp_path / "what").write_text("a")

    assert run.is_noticed(mutant, tmp_path) is False
    place = run.Place(tmp_path / "what", 0)
    assert run.apply(mutant, place) == "a"
    assert run.is_noticed(mutant, tmp_path) is True
    assert run.is_noticed(mutant._replace(tests=("absent.py",)), tmp_path) is None
