"""What there is to say about each data set before it is read. Free of torch and numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceCard:
    """A data set: what it is, and which files it is read from.

    `num_examples`, `num_classes` and `input_shape` are those of the whole set as published, read without options.
    `num_train` of them were published to train on (None: there is no such part).
    `files` has a line for each accepted form, `folders` the names of subfolders they are looked for in, `options`
    those of `sources.read` that the set can use. `is_obtainable`: `sparsona data get` can download it. `is_natural`:
    its clients are people, each with as many examples as it has.
    """

    name: str
    title: str
    summary: str
    num_examples: int
    num_classes: int
    input_shape: tuple[int, ...]
    origin: str
    licence: str
    num_train: int | None = None
    default_model: str = "digits-cnn"
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    address: str = ""
    is_obtainable: bool = False
    is_natural: bool = False

    @property
    def has_tokens(self) -> bool:
        """Whether examples are sequences of tokens."""
        return len(self.input_shape) == 1


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
        num_train=50_000,
        default_model="vgg11",
        files=(
            "data_batch_1.bin to data_batch_5.bin and test_batch.bin (binary version)",
            "data_batch_1 to data_batch_5 and test_batch (python version)",
            SHEETS,
            "cifar10.npz with x_train, y_train, x_test, y_test",
        ),
        folders=("cifar10", "cifar-10-batches-bin", "cifar-10-batches-py"),
        options=("crop", "augment"),
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
        is_obtainable=True,
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
        num_train=50_000,
        default_model="resnet18",
        files=(
            "train.bin and test.bin (binary version)",
            "train and test (python version)",
            SHEETS,
            "cifar100.npz with x_train, y_train, x_test, y_test",
        ),
        folders=("cifar100", "cifar-100-binary", "cifar-100-python"),
        options=("crop", "augment"),
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
        is_obtainable=True,
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
        num_train=60_000,
        default_model="cnn28",
        files=(
            IDX + " (for writers, also qmnist-train- and qmnist-test-labels-idx2-int)",
            "mnist.npz with x_train, y_train, x_test, y_test",
        ),
        folders=("mnist", "MNIST/raw", "qmnist", "QMNIST/raw"),
        address="http://yann.lecun.com/exdb/mnist/",
        is_obtainable=True,
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
        num_train=60_000,
        default_model="cnn28",
        files=(
            IDX,
            "fashion-mnist.npz with x_train, y_train, x_test, y_test",
        ),
        folders=("fashion-mnist", "FashionMNIST/raw"),
        address="https://github.com/zalandoresearch/fashion-mnist",
        is_obtainable=True,
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
        num_train=124_800,
        default_model="lenet5",
        files=(
            "emnist-letters-train- and -test-images-idx3-ubyte and -labels-idx1-ubyte, each perhaps with .gz",
            "emnist-letters.npz with x_train, y_train, x_test, y_test",
        ),
        folders=("emnist-letters", "emnist", "EMNIST/raw", "gzip"),
        address="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        is_obtainable=True,
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
        num_train=697_932,
        default_model="pfedgate-emnist",
        files=(
            "emnist-byclass-train- and -test-images-idx3-ubyte and -labels-idx1-ubyte, each perhaps with .gz",
            "emnist-byclass.npz with x_train, y_train, x_test, y_test",
        ),
        folders=("emnist-byclass", "emnist", "EMNIST/raw", "gzip"),
        address="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        is_obtainable=True,
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
        is_natural=True,
        default_model="pfedgate-emnist",
        files=("train/*.json and test/*.json as LEAF's preprocess.sh writes them",),
        folders=("femnist", "femnist/data"),
        address="https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
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
        num_train=100_000,
        default_model="resnet18",
        files=("train/CLASS/images/*.JPEG, and val/images/*.JPEG with val/val_annotations.txt or val/CLASS/*.JPEG",),
        folders=("tiny-imagenet", "tiny-imagenet-200"),
        options=PICTURE_OPTIONS,
        address="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        is_obtainable=True,
    ),
    SourceCard(
        name="shakespeare",
        title="Shakespeare, next character",
        summary="Plays by speaker: 299 of them, 145 with ten turns or more; the next character is asked for.",
        num_examples=54_946,
        num_classes=69,
        input_shape=(20,),
        origin="W. Shakespeare; as one text by A. Karpathy, 2015, or by role in LEAF, S. Caldas et al., 2018",
        licence="public domain",
        is_natural=True,
        default_model="transformer",
        files=(
            "input.txt: turns that begin with a line NAME:, an empty line between them",
            "train/*.json and test/*.json as LEAF's preprocess.sh writes them",
        ),
        folders=("shakespeare", "shakespeare/data"),
        options=("sequence_length",),
        address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        is_obtainable=True,
    ),
    SourceCard(
        name="shakespeare-words",
        title="Shakespeare, next word",
        summary="Plays by speaker: 299 of them, 145 with ten turns or more; the next word is asked for.",
        num_examples=15_615,
        num_classes=10_004,
        input_shape=(20,),
        origin="W. Shakespeare; as one text by A. Karpathy, 2015",
        licence="public domain",
        is_natural=True,
        default_model="transformer",
        files=("input.txt: turns that begin with a line NAME:, an empty line between them",),
        folders=("shakespeare-words", "shakespeare"),
        options=TEXT_OPTIONS,
        address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        is_obtainable=True,
    ),
    SourceCard(
        name="stackoverflow",
        title="Stack Overflow, next word",
        summary="Sentences of questions and answers, by user: 342,477 of them; the next word is asked for.",
        num_examples=152_404_765,
        num_classes=10_004,
        input_shape=(20,),
        origin="Stack Overflow; shared out by user in TensorFlow Federated, 2019",
        licence="CC BY-SA 3.0",
        num_train=135_818_730,
        is_natural=True,
        default_model="transformer",
        files=(
            "stackoverflow_train.h5 and stackoverflow_test.h5 (stackoverflow.tar.bz2, unpacked)",
            "stackoverflow.sqlite (stackoverflow.sqlite.lzma, unpacked)",
        ),
        folders=("stackoverflow", "stackoverflow/datasets"),
        options=TEXT_OPTIONS,
        address="https://storage.googleapis.com/tff-datasets-public/stackoverflow.tar.bz2",
    ),
    SourceCard(
        name="gldv2",
        title="Google Landmarks v2, by author",
        summary="Photographs of 2,028 landmarks by 1,262 authors, resized to 256 and cropped to 224 pixels.",
        num_examples=164_172,
        num_classes=2028,
        input_shape=(3, 224, 224),
        origin="T. Weyand et al., Google Landmarks Dataset v2, 2020; by author: T.-M. H. Hsu et al., 2020",
        licence="CC BY 4.0; each photograph under a Creative Commons licence of its own",
        is_natural=True,
        default_model="resnet18-gldv2",
        files=("federated_train.csv, and beside it images/ID.jpg or train/0/1/2/ID.jpg for each image_id in it",),
        folders=("gldv2", "gldv2/landmarks-user-160k", "landmarks-user-160k"),
        options=PICTURE_OPTIONS,
        address="https://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k.zip and "
        "https://github.com/cvdfoundation/google-landmark",
    ),
)

SOURCES: dict[str, SourceCard] = {card.name: card for card in _CARDS}
