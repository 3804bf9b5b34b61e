"""Save a tiny random encoder with an adapter. Runs in the server environment, because it needs torch."""

import sys
from pathlib import Path

from tests.parity.test_pooled_models import save_adapter
from tests.pooled import make_model, save_tokenizer, save_transformer_folder

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = make_model("bert", "Model", folder / "model")
    save_tokenizer(folder / "model")
    save_transformer_folder(folder / "model", normalize=True)
    save_adapter(model, folder / "adapters" / "tuned", target_modules=["query"])
