"""One's own arrays from a file, and views that do not fit them."""

import zipfile

import numpy as np
import pytest
from sample_pixels import random_bytes

import sparsona as sp
from sparsona.core.errors import SparsonaError
from sparsona.data.catalog import own_spec
from sparsona.data.pool import Pool, View
from sparsona.data.read import read
from sparsona.data.readers.npz import has_owners


def test_arrays(tmp_path):
    path = tmp_path / "mine.npz"
    x, y = random_bytes(6, 5, 4), np.array([0, 1, 2, 0, 1, 2])
    np.savez(path, x=x, y=y, owners=np.array(["b", "a", "b", "c", "a", "c"]))
    pool = read(f"arrays:{path}")
    assert np.array_equal(pool.x, x[:, None])
    assert (pool.name, pool.num_classes, pool.num_train) == ("mine", 3, None)
    assert pool.owners.tolist() == [1, 0, 1, 2, 0, 2]
    assert read(f"arrays:{path}", augment=True).view == View(pad=4, flip=True)
    np.savez(
        path,
        x_train=x[:4] / 2,
        y_train=y[:4],
        x_test=x[4:] / 2,
        y_test=y[4:],
        owners_train=[7, -1, 7, 9],
        owners_test=[9, 7],
    )
    pool = read(f"arrays:{path}")
    assert pool.x.dtype == np.float32
    assert (pool.x.shape, pool.num_train, pool.owners.tolist()) == ((6, 5, 4), 4, [0, -1, 0, 1, 1, 0])
    with pytest.raises(SparsonaError, match="cannot be cropped or augmented"):
        read(f"arrays:{path}", augment=True)


SPLIT = {"x_train": [[4], [5]], "y_train": [0, 1], "x_test": [[4], [5]], "y_test": [0, 1]}


def test_arrays_of_tokens(tmp_path):
    path = tmp_path / "text.npz"
    np.savez(path, x=np.arange(6).reshape(2, 3), y=np.arange(1, 7).reshape(2, 3))
    pool = read(f"arrays:{path}")
    assert pool.has_tokens
    assert (pool.y.dtype, pool.num_classes) == (np.int32, 7)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": [1]}, "lacks 'y'"),
        ({"x_train": [1], "y_train": [0]}, "lacks 'x_test'"),
        ({"x": [[1], [2]], "y": [0]}, "x has shape"),
        ({"x": [], "y": []}, r"x and y have no examples\n  expected: one or more"),
        ({**SPLIT, "x_test": np.zeros((0, 1)), "y_test": []}, "x_test and y_test have no examples"),
        ({"x": [], "y": [1]}, "as many labels"),
        ({"x": [[1.0]], "y": [0.0]}, "whole numbers"),
        ({"x": [[1.0]], "y": [-1]}, "whole numbers"),
        ({"x": [["a"]], "y": [0]}, "x is"),
        ({"x": [[1.0]], "y": [0], "owners": [[1]]}, "owners"),
        ({"x": [[1.0]], "y": [0], "owners": 1}, "owners"),
        ({"x": [[1.0]], "y": [0], "owners": [1, 2]}, "owners"),
        ({**SPLIT, "owners_train": [1]}, "owners"),
        ({**SPLIT, "owners_train": [1, 2, 3], "owners_test": [1]}, "owners"),
        (
            {"x": [[1.0]], "y": [0], "owners": [1.5]},
            r"bad.npz': owners are float64 of shape \(1,\): 1 of 1 are not whole\n  expected: one for each example",
        ),
        (
            {"x": [[1.0]], "y": [0], "owners": np.array([2**63], np.uint64)},
            "bad.npz': owners are uint64, and 1 of 1 are ",
        ),
        ({"x": [[1.0]], "y": [0], "owners": [2.0**53]}, "bad.npz': owners are float64, and 1 of 1 are floats so large"),
        ({"x": [[1.0]], "y": [0], "owners": [["a"]]}, r"owners of shape \(1, 1\)"),
        (
            {"x": np.eye(9), "y": [0] * 9, "owners": ["a"] * 8},
            r"owners of shape \(8,\)\n  expected: a number or name for each example, shape \(9,\)",
        ),
        ({**SPLIT, "y_test": [[4], [5]]}, "y_test has rows of shape"),
        ({**SPLIT, "x_test": [[4, 5], [6, 7]]}, "x_test has rows of shape"),
        ({"x": np.array([{}], dtype=object), "y": [0]}, "holds Python objects"),
        (
            {"x": [[1]], "y": [0], "owners": np.array([None])},
            'write "" in place of None or NaN for examples without an',
        ),
        ({"x": [[1]], "y": np.array([None])}, "first drop the examples without a label"),
        ({"x": [[1], [2]], "y": ["a", ""], "owners": ["p", "q"]}, "bad.npz': y has no label in 1 of 2 .*, of owner q,"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1]}, "NaN or infinity in 1 of 2 examples"),
        ({"x": [[1.0], [1e300]], "y": [0, 1]}, "NaN or infinity"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1], "owners": ["p", "q"]}, "in 1 of 2 examples, of owner q, the first is"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1], "owners": [7, 9]}, "in 1 of 2 examples, of owner 9, the first is"),
        ({"x": [[1.0], [2.0]], "y": [0, 10**12]}, "never occur"),
        ({"x": [[1.0], [2.0]], "y": np.array([0, 2**63 + 5], dtype=np.uint64)}, "outside the range"),
        ({"x": [[-3, 5], [6, 7]], "y": [[4, 5], [6, 7]]}, "whole numbers from 0"),
        ({"x": [[4, 5], [6, 7]], "y": [[4, -5], [6, 7]]}, "tokens from -5"),
        ({"x": np.array([[4, 2**63 + 1]], dtype=np.uint64), "y": [[4, 5]]}, "a token 9223372036854775809"),
        ({"x": [[4, 2**31 + 5]], "y": [[4, 5]]}, "a token 2147483653"),
        ({"x": [[0, 1], [2, 3]], "y": [[1, 2], [3, 0]]}, "nothing could be scored"),
        ({"x": np.zeros((5, 0)), "y": np.zeros(5, int)}, r"x has shape \(5, 0\)"),
        ({"x": np.zeros((5, 3, 0, 4), np.uint8), "y": np.zeros(5, int)}, "x has shape"),
    ],
)
def test_arrays_that_will_not_do(tmp_path, arrays, said):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(SparsonaError, match=said) as told:
        read(f"arrays:{tmp_path / 'bad.npz'}")
    assert "download" not in told.value.hint  # it is the user's own


def test_other_files_say_how_they_become_arrays(tmp_path, monkeypatch):
    """A table or one array, by its own name or renamed."""
    monkeypatch.chdir(tmp_path)
    for name, hint in (
        ("data.csv", "frame = pandas.read_csv('data.csv'); numpy.savez('data.npz', x=frame[[...]].to_numpy(float)"),
        (" data.CSV", "or in Python sparsona.federate(frame, target='...'): see docs/data.md"),
        ("data.npy", "numpy.savez('data.npz', x=numpy.load('data.npy'), y=labels)"),
    ):
        with pytest.raises(
            SparsonaError, match=r"files of this kind are not read\n  expected: arrays:PATH.npz"
        ) as told:
            read(name)
        assert hint in told.value.hint
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.eye(3))
    (tmp_path / "table.npz").write_text("age,ill\n30,0\n")
    (tmp_path / "table.csv").write_text("age,ill\n30,0\n")
    for name in ("one.npz", "table.npz", "arrays:table.csv"):
        with pytest.raises(SparsonaError, match="it is no npz file, whatever it is called") as told:
            read(name)
        assert "pickle" not in str(told.value)
        assert "numpy.savez(" in told.value.hint
    monkeypatch.setenv("SPARSONA_DATA", str(tmp_path))
    with pytest.raises(SparsonaError, match="download it again"):
        read(f"arrays:{tmp_path / 'table.npz'}")


def test_arrays_absent_or_no_npz(tmp_path):
    with pytest.raises(SparsonaError, match="does not exist"):
        read(f"arrays:{tmp_path / 'absent.npz'}")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(SparsonaError, match="cannot be read"):
        read(f"arrays:{tmp_path / 'bad.npz'}")
    with (tmp_path / "bad.npz").open("wb") as file:
        np.save(file, np.arange(3))  # one array, whatever it is called
    with pytest.raises(SparsonaError, match="cannot be read"):
        read(f"arrays:{tmp_path / 'bad.npz'}")
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("x.npy", b"garbage")
        archive.writestr("y.npy", b"garbage")
    with pytest.raises(SparsonaError, match="'x' is not an array"):
        read(f"arrays:{tmp_path / 'bad.npz'}")


@pytest.mark.parametrize("name", ["x.npy", "y.npy"])
def test_arrays_that_promise_more_than_fits_into_memory(tmp_path, name):
    head = "{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117) + "\n"
    np.savez(tmp_path / "bad.npz", **{key: np.arange(4) for key in ("x", "y") if f"{key}.npy" != name})
    with zipfile.ZipFile(tmp_path / "bad.npz", "a") as archive:
        archive.writestr(name, b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + b"1234")
    with pytest.raises(SparsonaError, match="cannot be read"):
        read(f"arrays:{tmp_path / 'bad.npz'}")


def test_arrays_whose_compressed_content_is_damaged(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, x=random_bytes(100, 5), y=np.arange(100))
    content = bytearray(path.read_bytes())
    content[60:200] = bytes(140)
    path.write_bytes(content)
    with pytest.raises(SparsonaError, match="cannot be read"):
        read(f"arrays:{path}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mean": (0.5,), "std": ()}, "std"),
        ({"mean": (0.5,), "std": (0.0,)}, "more than 0"),
        ({"mean": (float("nan"),), "std": (1.0,)}, "finite"),
        ({"pad": -1}, "pad -1"),
        ({"crop": 0}, "crop 0"),
    ],
)
def test_views_that_cannot_be(options, said):
    with pytest.raises(SparsonaError, match=said):
        View(**options)


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (View(crop=9), (3, 8, 12)),
        (View((0.5,), (1.0,)), (3, 8, 8)),
        (View((0.5, 0.5), (1.0, 1.0)), (3, 8, 8)),
        (View(pad=4), (5,)),
        (View(flip=True), (8, 8)),
    ],
)
def test_views_that_do_not_fit_the_examples(view, shape):
    with pytest.raises(SparsonaError, match="of examples of shape"):
        Pool("mine", np.zeros((2, *shape), np.uint8), np.arange(2), 2, view=view)


def test_names_and_test_arrays_of_a_file(tmp_path, capsys):
    """Owners and classes by name, in one file with the test examples; what is not used is told."""
    path = tmp_path / "har.npz"
    x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.array(["sit", "run"] * 4)
    np.savez(path, x=x[:6], y=y[:6], x_test=x[6:], y_test=y[6:], owner=["p", "q"] * 3, owner_test=["q", "p"], extra=3)
    pool = read(str(path))
    assert (pool.name, pool.num_train, pool.num_classes) == ("har", 6, 2)
    assert (pool.owner_names, pool.class_names) == (("p", "q"), ("run", "sit"))
    assert pool.owners.tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
    assert pool.y.tolist() == [1, 0] * 4
    assert "arrays that are not used: 'extra'; read are x and y" in capsys.readouterr().err
    read(str(path))
    assert not capsys.readouterr().err  # once is enough
    np.savez(path, x=x, y=[0, 1] * 4, class_names=["sit", "run", "walk"])
    assert (read(str(path)).class_names, read(str(path)).num_classes) == (("sit", "run", "walk"), 3)


def test_owners_that_are_whole_numbers_with_gaps(tmp_path):
    np.savez(tmp_path / "gaps.npz", x=np.eye(6), y=[0, 1] * 3, owners=[7, np.nan, 9, 7, 9, np.nan])
    assert read(str(tmp_path / "gaps.npz")).owners.tolist() == [0, -1, 1, 0, 1, -1]


GOOD = {"x": [[1.0], [2.0]], "y": ["a", "b"]}


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({**GOOD, "owner_s": [0, 1]}, r"has an array 'owner_s', which is not read(.|\n)*did you mean 'owners'"),
        ({**GOOD, "Owners": [0, 1]}, "did you mean 'owners'"),
        ({**GOOD, "x_tests": [[1.0]]}, "did you mean 'x_test'"),
        ({**GOOD, "class_name": ["a"]}, "did you mean 'class_names'"),
        ({**GOOD, "owner": [0, 1], "owners": [0, 1]}, "both 'owner' and 'owners'"),
        ({**GOOD, "x_train": [[1.0]], "y_train": [0]}, "'x_train' beside 'x'"),
        ({**GOOD, "x_test": [[1.0]]}, "lacks 'y_test'"),
        ({**GOOD, "class_names": [1, 2]}, "class_names is int64"),
        ({**GOOD, "class_names": ["a"]}, "unknown label in(.|\n)*'b'"),
        ({**GOOD, "class_names": ["a", "a", "b"]}, "two classes are called 'a'"),
    ],
)
def test_names_that_will_not_do(tmp_path, arrays, said):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(SparsonaError, match=said):
        read(str(tmp_path / "bad.npz"))


def test_one_client_of_several_machines_names_all_classes(tmp_path):
    """Alone it cannot know which number a text has: its file must say so."""
    np.savez(tmp_path / "mine.npz", **GOOD)
    with pytest.raises(SparsonaError, match="the labels are texts, and the file has no class_names"):
        read(str(tmp_path / "mine.npz"), num_classes=2)
    np.savez(tmp_path / "mine.npz", **GOOD, class_names=["c", "b", "a"])
    assert read(str(tmp_path / "mine.npz"), num_classes=3).y.tolist() == [2, 1]


def test_a_path_alone(tmp_path, monkeypatch):
    """A file that ends in .npz and a folder are data; a data set of that name comes first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "digits").mkdir()
    assert own_spec("mine.npz") == "arrays:mine.npz"
    assert own_spec("arrays:mine.npz") == "arrays:mine.npz"
    assert own_spec("photos") == "folder:photos"
    assert own_spec("digits") == "digits"
    assert own_spec("./digits") == "folder:./digits"
    assert own_spec("nonsense") == "nonsense"
    with pytest.raises(SparsonaError, match=r"absent\.npz' does not exist"):
        read("absent.npz")
    np.savez(tmp_path / "mine.npz", **GOOD, owners_train=[1])
    assert has_owners(tmp_path / "mine.npz")
    np.savez(tmp_path / "mine.npz", **GOOD)
    assert not has_owners(tmp_path / "mine.npz")
    assert not has_owners(tmp_path / "absent.npz")


def test_what_newcomers_write(tmp_path):
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "har.npz", x=x, y=y, subject=np.arange(4))
    with pytest.raises(SparsonaError, match="'subject', which is not read") as caught:
        sp.train("local", data=str(tmp_path / "har.npz"))
    assert "call it 'owners'" in caught.value.hint
    with pytest.raises(SparsonaError, match="does not exist") as caught:
        sp.train("local", data=str(tmp_path / "hra.npz"))
    assert "har.npz" in caught.value.hint
    np.savez(tmp_path / "objects.npz", x=x, y=np.array(["a", "b", "a", "b"], dtype=object), allow_pickle=True)
    with pytest.raises(SparsonaError, match="the array 'y' holds Python objects") as caught:
        sp.train("local", data=str(tmp_path / "objects.npz"))
    assert "y.astype(str)" in caught.value.hint
    with pytest.raises(SparsonaError, match="labels from 1 to 2") as caught:
        sp.federate(x, y + 1, clients=2)
    assert "y - 1" in caught.value.hint
