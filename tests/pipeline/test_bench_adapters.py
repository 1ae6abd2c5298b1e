"""Would catch: a merged adapter that is timed unmerged, or one without weights; memory of the base
counted again for every adapter; a rank under another's name.
"""

import json
from pathlib import Path

import pytest
from tiny import tiny_target_folder

from pipeline.bench_adapters import main


def test_adapters_are_measured_on_one_base(tmp_path: Path, capsys) -> None:
    target = tiny_target_folder(tmp_path / "target")
    out = tmp_path / "adapters.json"
    words = [str(target), str(target), "--ranks", "2", "4", "--modules", "q_proj", "v_proj"]
    main([*words, "--rounds", "2", "--dtype", "float32", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    names = ["base", *(f"rank {r}, {how}" for r in (2, 4) for how in ("on the base", "merged"))]
    assert [row["drafter"] for row in rows] == names
    assert rows[0]["ratio"] == 1
    on_base = {row["drafter"]: row["megabytes"] for row in rows}
    # Four layers of width 32: q gives 32, v gives 16; float32.
    assert on_base["rank 2, on the base"] == pytest.approx(4 * 2 * (32 + 32 + 32 + 16) * 4 / 1e6)
    assert on_base["rank 4, on the base"] == 2 * on_base["rank 2, on the base"]
    merged = 4 * (32 * 32 + 32 * 16) * 4 / 1e6
    assert on_base["rank 2, merged"] == pytest.approx(on_base["rank 2, on the base"] + merged)
    assert "MB of its own" in capsys.readouterr().out


def test_a_drafter_without_layers_is_refused(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target")
    with pytest.raises(ValueError, match="NgramDrafter has no layers to adapt"):
        main([str(target), "ngram"])
