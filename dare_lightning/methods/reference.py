"""The policy that training started from, which a divergence or a preference is measured against."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from dare_lightning.families.adapters import adapters_disabled, has_adapter
from dare_lightning.families.base import PolicyModel


class Reference:
    """A frozen copy of the policy; for an adapter the base model itself, under the switched-off adapter.

    It is no torch module, so that the copy is neither trained nor saved.
    """

    def __init__(self) -> None:
        self._copy: PolicyModel | None = None

    def keep(self, policy: PolicyModel) -> None:
        """Copy the policy as it is now, unless that was done before; an adapter's base needs no copy."""
        if self._copy is None and not has_adapter(policy):
            self._copy = copy.deepcopy(policy).requires_grad_(False).eval()

    @contextmanager
    def of(self, policy: PolicyModel) -> Iterator[PolicyModel]:
        """The reference of this policy.

        Raises:
            RuntimeError: no copy was kept.
        """
        if self._copy is not None:
            # Not registered, so nobody else brings it to the policy's device and precision.
            like = next(policy.parameters())
            yield self._copy.to(device=like.device, dtype=like.dtype)
        elif has_adapter(policy):
            with adapters_disabled(policy):
                yield policy
        else:
            raise RuntimeError("no reference policy was kept: call keep_reference() before the policy is trained")
