"""Where an intervention under ``on`` sees the tokens, however ``forward`` is called."""

from contextlib import contextmanager

import torch

from mechattn.interventions.intervention import on


class Watches:
    """An intervention that changes nothing, and keeps the positions of each pass."""

    def __init__(self):
        self.positions = []

    def check(self, model, prompts):
        """It can watch every model."""

    @contextmanager
    def acting(self, model, target):
        def keep(module, arguments, output):
            self.positions.append(target().positions.tolist())

        handle = model.get_input_embeddings().register_forward_hook(keep)
        yield
        handle.remove()


def positions(model, *arguments, **options):
    watches = Watches()
    with on(watches, model), torch.no_grad():
        model(*arguments, **options)
    return watches.positions


def test_a_mask_by_place_is_read_as_one_by_name(toy):
    model = toy.original_model
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected = [[[-1, -1, 0, 1], [0, 1, 2, 3]]]
    assert positions(model, tokens, attention_mask=mask) == expected
    assert positions(model, tokens, mask) == expected
