"""zarrita.js, TensorStore and GDAL read what is served; what each asks for is counted."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.gateway.conftest import TOKEN, VALUES, missing, node, zarrita
from tests.unit.gateway.serving import serving

if TYPE_CHECKING:
    from tests.unit.gateway.serving import Server

_CHANGED = VALUES.copy()
_CHANGED[2, :12, :20] = -1


def _run_zarrita(*arguments: str) -> dict[str, object]:
    script = Path(__file__).parent / "zarrita" / "read.js"
    command = [str(node()), str(script), str(zarrita()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_zarrita_opens_and_slices_in_two_requests(server: Server) -> None:
    """The root's document, which brings all others, and the one chunk."""
    found = _run_zarrita(f"{server.url}/@branch.main", "model/t2m")
    assert found == {
        "shape": [3, 24, 40],
        "contents": ["/", "/model", "/model/t2m"],
        "part": {"shape": [3, 40], "data": VALUES[0, :3].ravel().tolist()},
        "requests": [
            ["/@branch.main/zarr.json", 200],
            ["/@branch.main/model/t2m/c/0/0/0", 200],
        ],
    }


def test_zarrita_reads_with_a_token(repository: Path, tmp_path: Path) -> None:
    """As browsers do, in a header."""
    grants = tmp_path / "grants.toml"
    grants.write_text(f'[[grant]]\nprincipal = "map"\ntoken = "{TOKEN}"\n', encoding="utf-8")
    with serving(repository, tmp_path, "--grants", str(grants)) as server:
        found = _run_zarrita(f"{server.url}/@tag.v1", "model/t2m", TOKEN)
        assert found["shape"] == [3, 24, 40]
        assert {who for who, *_ in server.requests()} == {"map"}


def test_tensorstore_reads_through_its_http_driver(server: Server) -> None:
    """Whole arrays and parts, of two states; a branch, a tag."""
    try:
        import tensorstore
    except ModuleNotFoundError:
        missing("TensorStore", "pip install tensorstore")
    for ref, values in (("branch.main", _CHANGED), ("tag.v1", VALUES)):
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "http",
                "base_url": f"{server.url}/",
                "path": f"@{ref}/model/t2m/",
            },
        }

        async def read(spec: dict[str, Any] = spec) -> Any:
            array = await tensorstore.open(spec, read=True, open=True)
            assert tuple(array.shape) == (3, 24, 40)
            return await array[1:3].read()

        assert np.array_equal(asyncio.run(read()), values[1:3])


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_gdal_reads_an_array(server: Server) -> None:
    """The root's document leads it to the array, which it takes for bands."""
    try:
        import rasterio
    except ModuleNotFoundError:
        missing("GDAL", "pip install rasterio")
    for ref, values in (("branch.main", _CHANGED), ("tag.v1", VALUES)):
        for array in ("/model/t2m", ""):
            place = f"/vsicurl/{server.url}/@{ref}"
            url = f'ZARR:"{place}":{array}' if array else f'ZARR:"{place}/model/t2m"'
            with rasterio.open(url) as opened:
                assert np.array_equal(opened.read(), values)
