"""Two devices more, imitated on the CPU: each tensor is said to lie on one, and operations that mix them raise."""

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

FIRST, SECOND = torch.device("xpu", 0), torch.device("xpu", 1)
CPU = torch.device("cpu")
_LIES_ON = WeakIdKeyDictionary()
_DEVICE, _CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__
_SET_DATA = torch.Tensor.data.__set__
_MOVES = (torch.Tensor.to, torch.Tensor.cpu)
# What torch allows between devices: a copy into a tensor; gradients; and the index of a tensor, if it is on the CPU.
_ACROSS = (torch.Tensor.copy_, torch.autograd.grad, torch.nn.Parameter)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def where(tensor):
    """The device that a tensor is said to lie on."""
    return _LIES_ON.get(tensor, CPU)


def laid(tensor, device):
    """The tensor, said to lie on a device."""
    _LIES_ON[tensor] = device
    return tensor


class Imitated(TorchFunctionMode):
    """While it is active, operations of torch check where their tensors lie, and the result lies there too."""

    def __enter__(self):
        self.new = torch.nn.Parameter.__new__

        def new(cls, data=None, requires_grad=True):
            made = self.new(cls, data, requires_grad)
            return made if data is None else laid(made, where(data))

        torch.nn.Parameter.__new__ = new
        return super().__enter__()

    def __exit__(self, *error):
        torch.nn.Parameter.__new__ = self.new
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (_DEVICE, _CUDA):
            return where(args[0]) if func == _DEVICE else False
        if func in _MOVES:
            return _moved(func, args, kwargs)
        if func is torch.Tensor.numpy and where(args[0]) != CPU:
            raise TypeError(f"can't convert a tensor on {where(args[0])} to numpy")
        if func == _SET_DATA:
            laid(args[0], where(args[1]))
            return func(*args)
        if func is torch.histc:  # of the CPU takes no integers; transformers asks for the device
            args = (args[0].float(), *args[1:])
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if asked is not None:
            kwargs["device"] = CPU if asked.type == "xpu" else asked
        there = _common(func, given)
        made = func(*args, **kwargs)
        if func is torch.autograd.grad:
            return tuple(
                laid(grad, where(tensor)) for grad, tensor in zip(made, args[1], strict=True)
            )
        return tree_map(
            lambda leaf: laid(leaf, asked or there) if isinstance(leaf, torch.Tensor) else leaf,
            made,
        )


def _common(func, given):
    """The device of an operation; those of single numbers do not count."""
    found = {where(tensor) for tensor in given if tensor.ndim}
    if func in _ACROSS:
        return where(given[0]) if given else CPU
    if func in _INDEXED:
        found = {where(given[0]), *(found - {CPU})}
    if len(found) > 1:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}: tensors on {sorted(map(str, found))}"
        )
    return found.pop() if found else max(map(where, given), key=str, default=CPU)


def _moved(func, args, kwargs):
    """``to`` and ``cpu``: a copy, if the device changes."""
    tensor, *rest = args
    target = CPU if func is torch.Tensor.cpu else None
    plain = []
    for value in rest:
        if isinstance(value, torch.Tensor):
            target = where(value)
            plain.append(value.dtype)
        elif isinstance(value, (str, torch.device, int)) and not isinstance(value, bool):
            target = torch.device("xpu", value) if isinstance(value, int) else torch.device(value)
        elif value is not None:
            plain.append(value)
    if kwargs.get("device") is not None:
        target = torch.device(kwargs["device"])
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "other")}
    dtype = [value for value in [*plain, kwargs.get("dtype")] if isinstance(value, torch.dtype)]
    made = torch.Tensor.to(tensor, *dtype) if dtype else tensor
    target = where(tensor) if target is None else target
    if target != where(tensor) and made is tensor:
        made = tensor.clone()
    return made if made is tensor else laid(made, target)


def dispatched(model, device_map):
    """The model as accelerate leaves one that it has spread over several devices."""
    for name, device in device_map.items():
        block = model.get_submodule(name)
        for part in block.modules():
            for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                laid(tensor, device)
            if part is block or next(part.parameters(recurse=False), None) is not None:
                _attached(part, device)
    _attached(model, next(iter(device_map.values())), io_same_device=True)
    model.hf_device_map = {name: str(device) for name, device in device_map.items()}
    return model


def _attached(module, device, **options):
    hook = AlignDevicesHook(execution_device=device, **options)
    hook.init_hook = lambda module: module  # the weights lie there already
    add_hook_to_module(module, hook)
