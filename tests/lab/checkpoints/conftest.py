"""As for the library's tests of Hugging Face models."""

from tests.library.hf.conftest import five as five
from tests.library.hf.conftest import quiet as quiet
