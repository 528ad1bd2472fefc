"""`stagerun fmt`: its style, that meaning and comments stay, and what it does to files."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from stagerun.cli import main
from stagerun.language import canonical, load
from stagerun.tools.fmt.style import formatted

SOLVERS = Path(__file__).parents[2] / "solvers"
MESSY = """\
\ufeffname:'messy';  seed : 3,   # of the order


stage\n{ name : "a" # first
  solver_param: < base_lr: 0.1 # a rate

     lr_policy: 'fixed'; max_iter: 10 > }
knot{iter:0 factor:0.1} # up
knot { iter: 420, factor:1 }# down
  # alone
solver { transform_param { mean_value: [104,117 ,
 123] crop_size: # behind the colon
   224 }
\tsnapshot_prefix: "a" 'b"c'
  "d"

}

"""
NEAT = """\
name: "messy" seed: 3             # of the order

stage {
  name: "a"                       # first
  solver_param {
    base_lr: 0.1                  # a rate

    lr_policy: "fixed" max_iter: 10
  }
}
knot { iter: 0   factor: 0.1 }    # up
knot { iter: 420 factor: 1 }      # down
# alone
solver {
  transform_param {
    mean_value: [
      104, 117,
      123
    ]
    crop_size:                    # behind the colon
        224
  }
  snapshot_prefix: "a" 'b"c'
      "d"
}
"""


def test_the_style() -> None:
    assert formatted(MESSY) == NEAT


@pytest.mark.parametrize("folder", sorted(SOLVERS.iterdir()), ids=lambda path: path.name)
def test_the_gallery_is_in_it(folder: Path) -> None:
    for path in folder.glob("*.prototxt"):
        if "proto-file: protos/stagerun" in path.read_text():
            assert formatted(path.read_text()) == path.read_text(), f"stagerun fmt {folder}"


GAPS = st.sampled_from([" ", "  ", "\t", "\n", "\n\n", " # c\n", "#\n", "\n# d\n", "\r\n"])
FIELDS = st.recursive(
    st.sampled_from([["x", ":", "1"], ["y", ":", '"#"'], ["y", ":", "'a'", '"b"'], ["z", ":", "[", "1", ",", "-2", "]"], ["w", ":", "[", "]"]]),
    lambda inner: st.builds(
        lambda fields, marks, colon: ["m", *[":"] * colon, marks[0], *(token for one in fields for token in one), marks[1]],
        st.lists(inner, max_size=3), st.sampled_from(["{}", "<>"]), st.booleans(),
    ),
)  # fmt: skip


@given(st.lists(FIELDS, max_size=5), st.data())
@example([["m", "{", "x", ":", "1", "}"]], None)
def test_twice_is_once_and_comments_stay(fields: list[list[str]], data: st.DataObject | None) -> None:
    gaps = [data.draw(GAPS) if data else " # c\n" for one in fields for _ in one]
    text = "".join(token + gap for token, gap in zip((t for one in fields for t in one), gaps, strict=True))
    once = formatted(text)  # which asserts that the tokens mean the same
    assert formatted(once) == once
    for comment in (" c", " d"):
        assert once.count(f"#{comment}") == text.count(f"#{comment}")


def test_a_long_line_takes_no_longer_than_it_must() -> None:
    text = f"stepvalue: [{', '.join(map(str, range(30_000)))}]\n"
    assert formatted(text) == text


def stagerun(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, done.output


def test_it_writes_the_files_of_a_folder_anew(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    for path in (SOLVERS / "fashion_collapse").glob("*.prototxt"):
        (folder / path.name).write_text(path.read_text())
    before = canonical(load(folder))
    real = tmp_path / "kept.prototxt"
    (folder / "cyc1.prototxt").rename(real)
    (folder / "cyc1.prototxt").symlink_to(real)
    real.write_text(real.read_text().replace("base_lr: 0.09", "base_lr :0.09;# peak"))
    real.chmod(0o640)
    messy = real.read_text()
    assert "base_lr: 0.09                     # peak" in stagerun("fmt", "--diff", folder)[1]
    code, output = stagerun("fmt", "--check", folder)
    assert code == 64 and f"{folder}/cyc1.prototxt: has another style" in output
    assert real.read_text() == messy
    code, output = stagerun("fmt", folder, f"{folder}/")
    assert code == 0 and output == f"{folder}/cyc1.prototxt: written anew\n1 of 6 files changed\n"
    assert (folder / "cyc1.prototxt").is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert canonical(load(folder)) == before
    assert stagerun("fmt", "--check", folder) == (0, "0 of 6 files would change\n")


def test_files_with_mistakes_stay(tmp_path: Path) -> None:
    text = 'name:"x"\nstage { nam: "a" }\n'
    (tmp_path / "schedule.prototxt").write_text(text)
    code, output = stagerun("fmt", tmp_path)
    assert code == 64 and "schedule.prototxt:2:9:" in output and "did you mean `name`?" in output
    assert (tmp_path / "schedule.prototxt").read_text() == text
    (tmp_path / "schedule.prototxt").unlink()
    code, output = stagerun("fmt", tmp_path)
    assert code == 64 and "schedule.prototxt" in output


def test_a_stage_that_its_sweeps_fill_needs_no_file(tmp_path: Path) -> None:
    rest = 'stage { name: "trunk" solver_param {} }\nstage { name: "collapse" %s }\n'
    swept = 'sweep { name: "a" solver { base_lr: 0.1 } } sweep { name: "b" solver { base_lr: 0.2 } }'
    (tmp_path / "schedule.prototxt").write_text(f"name:'x'\n{rest % swept}")
    assert stagerun("fmt", "--check", tmp_path)[1].startswith(
        f"{tmp_path}/schedule.prototxt: has another style\n1 of 1 file"
    )
    code, output = stagerun("fmt", tmp_path)
    assert code == 0 and output.endswith("1 of 1 file changed\n")
    (tmp_path / "collapse.prototxt").write_text("max_iter:10\n")  # it may have one all the same
    assert stagerun("fmt", tmp_path)[1] == f"{tmp_path}/collapse.prototxt: written anew\n1 of 2 files changed\n"
    (tmp_path / "collapse.prototxt").unlink()
    (tmp_path / "schedule.prototxt").write_text("name:'x'\n" + rest % 'sweep { name: "a" }')
    code, output = stagerun("fmt", tmp_path)
    assert code == 64 and f"{tmp_path}/collapse.prototxt:1:1: there is no such file" in output
