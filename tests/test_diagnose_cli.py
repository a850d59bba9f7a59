"""`stablenorm diagnose`: files of every kind, whole and damaged."""

import json

import ml_dtypes
import numpy as np
import pytest

from stablenorm import cli, diagnose
from stablenorm.cli import diagnose as command


@pytest.fixture
def x():
    return (3 + np.random.default_rng(0).standard_normal((6, 5, 32))).astype(np.float32)


def write_safetensors(path, tensors):
    """Write {name: (type, array)} by hand: another implementation than that which reads it."""
    header, data = {"__metadata__": {"format": "np"}}, b""
    for name, (kind, array) in tensors.items():
        raw = array.tobytes()
        places = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": places}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def run(capsys, *arguments):
    status = cli.main(["diagnose", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def found_in(capsys, tmp_path, *arguments):
    """Run, and return what was written as JSON."""
    target = tmp_path / "found.json"
    status, _, err = run(capsys, *arguments, "--json", target)
    assert (status, err) == (0, "")
    return json.loads(target.read_text())


def expected(x, **options):
    return json.loads(diagnose(x, **options).to_json())


def test_every_kind_of_file_says_what_the_array_says(x, tmp_path, capsys):
    bf = x.astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "c.npy", x)
    np.save(tmp_path / "f.npy", np.asfortranarray(x))
    np.save(tmp_path / "big.npy", x.astype(">f4"))
    np.save(tmp_path / "bf.npy", bf)
    np.savez(tmp_path / "one.npz", h=x)
    np.savez_compressed(tmp_path / "more.npz", a=x, b=x[0], c=bf)
    write_safetensors(tmp_path / "m.safetensors", {"w": ("BF16", bf), "v": ("F32", x)})
    for name in ("c.npy", "f.npy", "big.npy", "one.npz"):
        assert found_in(capsys, tmp_path, tmp_path / name) == expected(x), name
    for name, member, array in (
        ("more.npz", "a", x),
        ("more.npz", "c", bf),
        ("m.safetensors", "w", bf),
        ("m.safetensors", "v", x),
    ):
        actual = found_in(capsys, tmp_path, tmp_path / name, "--member", member)
        assert actual == expected(array), (name, member)
    assert found_in(capsys, tmp_path, tmp_path / "bf.npy") == expected(bf)
    for name, member in (("c.npy", None), ("more.npz", "a"), ("m.safetensors", "v")):
        chosen = [] if member is None else ["--member", member]
        for axis in ((1,), (0, 2)):
            actual = found_in(capsys, tmp_path, tmp_path / name, *chosen, "--axis", *axis)
            assert actual == expected(x, axis=axis), (name, axis)


def test_files_of_the_safetensors_package_are_read(x, tmp_path, capsys):
    package = pytest.importorskip("safetensors.numpy")
    package.save_file({"h": x}, tmp_path / "h.safetensors")
    assert found_in(capsys, tmp_path, tmp_path / "h.safetensors") == expected(x)
    package.save_file({"x": x}, tmp_path / "x.safetensors")
    assert cli.main(["run", str(tmp_path / "x.safetensors")]) == 0


def test_x_and_eps_of_an_npz_are_taken(x, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=x, g=x[0], eps=1e-3)
    assert found_in(capsys, tmp_path, tmp_path / "x.npz") == expected(x, eps=1e-3)
    actual = found_in(capsys, tmp_path, tmp_path / "x.npz", "--eps", 0, "--top", 2)
    assert actual == expected(x, eps=0.0, top=2)


def test_the_bundled_data_is_diagnosed_in_60_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    status, out, err = run(capsys, "--dtype", "float16")
    assert (status, err) == (0, "")
    # A path is one word, as long as the checkout's.
    assert all(len(line) <= 60 for line in out.splitlines() if " " in line.strip())
    assert "E[x^2] - E[x]^2" in " ".join(out.split())


def test_an_interrupt_leaves_nothing_behind(x, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    np.save(tmp_path / "c.npy", x)
    monkeypatch.setattr(command, "diagnose", interrupted)
    status, out, err = run(capsys, tmp_path / "c.npy", "--json", tmp_path / "found.json")
    assert (status, out, err) == (130, "", "stablenorm: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["c.npy"]
