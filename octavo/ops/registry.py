"""The operator registry: an operator is a torch function that states its meaning, with faster providers beside it.

    @op
    def rms_norm(x, weight, eps): ...                      # the reference, provider "torch"

    @rms_norm.register("triton", supported=has_triton, accepts=lambda x, weight, eps: x.is_cuda)
    def _rms_norm_triton(x, weight, eps): ...

`supported()` asks about the machine, once; `accepts(*args)` about the call. A call goes to the first provider, in order of
preference, that accepts it; the reference accepts everything. A provider forced by name (`--op-providers`,
`OCTAVO_OP_PROVIDERS`) that refuses raises with every property of the call.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo import envs
from octavo.errors import ConfigError

REGISTRY: dict[str, "Op"] = {}

DEFAULT_TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


@dataclass(slots=True)
class Provider:
    """One implementation of an operator."""

    name: str
    fn: Callable[..., Any]
    supported: Callable[[], bool]
    accepts: Callable[..., bool]
    by_name_only: bool = False  # never tried unless it is asked for
    available: bool | None = None  # the cached answer of supported()

    def is_available(self) -> bool:
        if self.available is None:
            self.available = bool(self.supported())
        return self.available


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


class Op:
    """An operator: callable like its reference.

    `inputs(rng, dtype, device)` yields argument tuples for the registry-wide test and `octavo bench kernels`; `tolerance`
    maps a dtype to (rtol, atol) where the default is too tight. `bytes_and_flops(*args)` estimates the memory traffic and
    the arithmetic of a call, for the benchmark; without it every tensor in and out counts once, and arithmetic not at all.
    `bench_inputs` are like `inputs` with the sizes of real models, where those of the tests are too small to say anything.
    """

    def __init__(self, reference: Callable[..., Any]):
        self.name = reference.__name__
        self.reference = reference
        self.__doc__ = reference.__doc__
        self.providers: list[Provider] = []  # in order of preference; the reference comes last, implicitly
        self.forced: str | None = None
        self.inputs: Callable[..., Any] | None = None
        self.bench_inputs: Callable[..., Any] | None = None
        self.tolerance = dict(DEFAULT_TOLERANCE)
        self.bytes_and_flops: Callable[..., tuple[int, int]] | None = None
        self.traced = reference  # what a compiler that traces a call sees in its place
        self._candidates: list[Provider] | None = None

    def register(
        self,
        name: str,
        *,
        supported: Callable[[], bool] = _always,
        accepts: Callable[..., bool] = _always,
        by_name_only: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a provider. Providers registered later are preferred; one `by_name_only` serves where it is asked for."""

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.providers.insert(0, Provider(name, fn, supported, accepts, by_name_only))
            self._candidates = None
            return fn

        return add

    def force(self, name: str | None) -> None:
        """Serve every call by the provider `name` ("torch" is the reference); None returns to preference order."""
        if name is not None and name != "torch":
            known = {p.name: p for p in self.providers}
            if name not in known:
                raise ConfigError(f"operator {self.name} has no provider {name!r}; it has {['torch', *known]}.")
            if not known[name].is_available():
                raise ConfigError(f"provider {name!r} of operator {self.name} is not supported on this machine.")
        self.forced = name
        self._candidates = None

    def candidates(self) -> list[Provider]:
        """Providers this machine supports, in order of preference, without the reference."""
        if self._candidates is None:
            forced = self.forced or _forced_by_environment(self.name)
            if forced == "torch":
                self._candidates = []
            elif forced is not None:
                self._candidates = [p for p in self.providers if p.name == forced]
                if not self._candidates:
                    raise ConfigError(f"operator {self.name} has no provider {forced!r}.")
                self.forced = forced
            else:
                self._candidates = [p for p in self.providers if not p.by_name_only and p.is_available()]
        return self._candidates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.traced(*args, **kwargs)
        for provider in self._candidates if self._candidates is not None else self.candidates():
            if provider.accepts(*args, **kwargs):
                return provider.fn(*args, **kwargs)
        if self.forced not in (None, "torch"):
            raise ConfigError(
                f"provider {self.forced!r} of operator {self.name} refuses this call: {describe_call(args, kwargs)}"
            )
        return self.reference(*args, **kwargs)

    @property
    def is_in_use(self) -> bool:
        """Whether anybody has called it: its providers' needs, a compiler say, are looked at only then."""
        return self._candidates is not None

    def chosen(self) -> str:
        """Name of the provider tried first, for the log line of who serves what."""
        found = self.candidates()
        return found[0].name if found else "torch"


def op(reference: Callable[..., Any]) -> Op:
    """Make a torch function an operator, known to the registry by its name."""
    made = Op(reference)
    if made.name in REGISTRY:
        raise ValueError(f"operator {made.name} is defined twice")
    REGISTRY[made.name] = made
    return made


ATTENTION_OPS = ("paged_attention", "decode_attention")


def force_providers(choices: Mapping[str, str], attention_backend: str | None = None) -> None:
    """Apply an engine's choice of providers to this process, in place of an earlier engine's.

    `choices` maps an operator to a provider; "*" stands for every operator that has the provider. `attention_backend` is
    the provider of the attention operators that have it. ConfigError for a name that does not exist or cannot run here.
    """
    for each in REGISTRY.values():
        each.force(None)
    if "*" in choices:
        _force_where_known(choices["*"], REGISTRY, "op_providers")
    if attention_backend is not None:
        _force_where_known(attention_backend, ATTENTION_OPS, "attention_backend")
    for name, provider in choices.items():
        if name == "*":
            continue
        if name not in REGISTRY:
            raise ConfigError(
                f"op_providers names {name!r}, which is no operator; there are {', '.join(sorted(REGISTRY))}.",
                param="op_providers",
            )
        REGISTRY[name].force(provider)


def _force_where_known(provider: str, names: Iterable[str], option: str) -> None:
    """Force `provider` on the operators of `names` that have it; ConfigError when none does."""
    ops = [REGISTRY[name] for name in names if name in REGISTRY]
    having = [each for each in ops if provider == "torch" or any(p.name == provider for p in each.providers)]
    if not having:
        known = sorted({p.name for each in ops for p in each.providers} | {"torch"})
        raise ConfigError(f"{option}: there is no provider {provider!r}; there are {', '.join(known)}.", param=option)
    for each in having:
        each.force(provider)


def _forced_by_environment(name: str) -> str | None:
    found = None
    for item in filter(None, envs.OCTAVO_OP_PROVIDERS.split(",")):
        key, _, value = item.partition("=")
        if key.strip() == name or (key.strip() == "*" and found is None):
            found = value.strip()
    # '*=triton' means "where there is one": operators without that provider keep their order.
    if found not in (None, "torch") and not any(p.name == found for p in REGISTRY[name].providers):
        return None
    return found


def describe_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Every property of a call that a provider may judge: shapes, dtypes, strides, devices, values."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{list(value.shape)} strides {list(value.stride())} on {value.device}"
        return repr(value)

    parts = [one(a) for a in args] + [f"{k}={one(v)}" for k, v in kwargs.items()]
    return "; ".join(parts)
