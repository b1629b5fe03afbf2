"""The in-process engine: each device samples in slots, which are freed and refilled. There is no server.

Requests wait in line. A thread prefills the prompts that have waited longest, and the devices assign free
slots to their responses. A group is returned when its last response has ended. So a long response blocks only
its own slot.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bapo_jax.groups import Begun, Prompt, Response, sampled_spans
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.vision.layout import ImageSource, Seen, see
from bapo_jax.models.vision.patches import Pixels, blank_pixels, windows_of
from bapo_jax.rollout.engine import Ask, Draw, Engine, RolloutError, Sampling, finish_of, tokens_left
from bapo_jax.rollout.inprocess.room import Limits, Room, padded_length, room_for
from bapo_jax.rollout.inprocess.slots import (
    ImagesInSlots,
    Places,
    Waiting,
    lay_out_weights,
    nothing_yet,
    prefill_prompts,
    sample_responses,
    split_rows,
)

_STEPS = 256  # most tokens per slot before the host checks for finished responses

Held = dict[int, tuple['_Group', int]]  # occupied places of a device: a response's group and index


class JaxEngine(Engine):
    """Samples with the nnx graph `graph`. `stop_tokens` end a response; `limits` are those of each device.

    `sight` provides the images of prompts; `attention` is as in `slots.ways_of`. Weights and slots take
    memory only while requests are pending, and the slots only as much as those need (room.py).
    """

    servers = 0

    def __init__(
        self, graph: nnx.GraphDef, model: ModelConfig, stop_tokens: tuple[int, ...], limits: Limits,
        mesh: Mesh | None = None, sight: ImageSource | None = None, attention: str = 'auto',
    ):  # fmt: skip
        self._graph, self._model, self._stop_tokens = graph, model, stop_tokens
        self._sight, self._attention = sight, attention
        self._mesh = mesh or Mesh(jax.devices()[:1], 'rows')
        self._limits = limits
        self._loaded: tuple[Any, int] | None = None  # parameters and version
        self._policy: Callable[[], _Policy | None] = lambda: None  # what was loaded, while it is in use
        self._waiting: collections.deque[_Group] = collections.deque()
        self._lock = threading.Lock()  # guards `_waiting` and `_policy`
        self._thread = ThreadPoolExecutor(1, thread_name_prefix='sampler')
        self._closed = False
        self.sampled = self.room = 0  # tokens sampled so far, and slot steps computed meanwhile

    def load(self, params: Any, version: int) -> None:
        # Groups that wait for the policy before it keep that one.
        self._loaded, self._policy = (params, version), lambda: None

    def ask(
        self, begun: Sequence[Begun], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        return self.asker()(begun, group_size, sampling, draws)

    def asker(self) -> Ask:
        if self._loaded is None:
            raise RuntimeError('the engine holds no policy yet: call load(params, version) before generate')
        with self._lock:
            policy = self._policy()
            if policy is None:
                params, version = self._loaded
                # Devices communicate here, as in the learner's programs, so one thread must launch both.
                policy = _Policy(lay_out_weights(params, model=self._model, mesh=self._mesh), version)
                self._policy = weakref.ref(policy)
        return functools.partial(self._ask, policy)

    def _ask(
        self, policy: _Policy, begun: Sequence[Begun], group_size: int, sampling: Sampling,
        draws: Sequence[Draw],
    ) -> list[Future[tuple[Response, ...]]]:  # fmt: skip
        kind = _Kind(sampling, policy)
        asked = [
            _Group(one, one.read, tokens_left(one, sampling), _key_data(draw), group_size, kind)
            for one, draw in zip(begun, draws, strict=True)
        ]
        with self._lock:
            self._waiting.extend(asked)
        self._thread.submit(self._answer_all)
        return [group.future for group in asked]

    def close(self) -> None:
        self._closed = True
        with self._lock:
            for group in self._waiting:
                if group.future.cancel():
                    group.future.set_running_or_notify_cancel()  # wakes the threads that wait for it
            self._waiting.clear()
        self._thread.shutdown()
        self._loaded = None

    def _answer_all(self) -> None:
        """Answers all waiting groups."""
        while self._waiting:
            held: list[Held] = [{} for _ in range(self._mesh.size)]
            try:
                self._answer(self._waiting[0].kind, held)
                if self._closed:
                    raise RolloutError('the engine was closed')
            except Exception as e:  # waiting callers get the error instead of an answer
                with self._lock:
                    lost = {group for of_device in held for group, _ in of_device.values()} | set(
                        self._waiting
                    )
                    self._waiting.clear()
                for group in lost:
                    if group.future.running() or group.future.set_running_or_notify_cancel():
                        group.future.set_exception(e)

    def _answer(self, kind: _Kind, held: list[Held]) -> None:
        """Answers the first group in line, and those behind it of the same kind."""
        sampling, weights = kind.sampling, kind.policy.weights
        with self._lock:
            alike = self._alike(kind)
            size = max(group.size for group in alike)
            room = self._wanted(alike, size)
        settings = {'graph': self._graph, 'mesh': self._mesh}
        rows, places, line = nothing_yet(
            model=self._model, mesh=self._mesh, rows=self._limits.slots, places=room.slots + room.line * size,
            line=room.line, prompt_tokens=room.prompt_tokens, response_tokens=sampling.max_tokens,
            cached=room.slots, key_slots=room.key_slots,
        )  # fmt: skip
        begun = wanted = np.zeros(len(held), np.int32)
        while not self._closed:
            if (begun == wanted).all():
                new = self._take(held, room, size, kind)
                if not any(new) and not any(held):
                    return
                begun, wanted = (
                    np.zeros_like(begun),
                    np.array([sum(group.size for group in groups) for groups in new], np.int32),
                )
                waiting = self._give_places(new, held, room.line * size)
                for prompts in self._inputs(new, room):
                    line = prefill_prompts(weights, line, *prompts, **settings)
            # While more groups that fit this room wait, sampling returns once the line is empty, so that no
            # slot stays idle. After that it returns once half of the remaining responses have ended, so that
            # groups are returned early.
            with self._lock:
                more = bool(self._that_suit(room, size, kind))
            few = np.array(
                [room.slots if more else min(room.slots, len(of_device)) // 2 for of_device in held], np.int32
            )
            rows, places, begun, steps = sample_responses(
                weights, rows, places, line, waiting, *jax.device_put((begun, few), split_rows(self._mesh)),
                jnp.int32(_STEPS), jnp.float32(sampling.temperature or 1), jnp.float32(sampling.top_p),
                **settings, stop_tokens=self._stop_tokens, greedy=sampling.temperature == 0,
                nucleus=sampling.temperature > 0 and sampling.top_p < 1, attention=self._attention,
            )  # fmt: skip
            begun, steps = np.asarray(begun), np.asarray(steps)
            self.room += int(steps.max()) * room.slots * self._mesh.size
            self._hand_out(places, held)
        raise RolloutError('the engine was closed before it had answered')

    def _alike(self, kind: _Kind) -> list[_Group]:
        """The groups of this kind at the head of the line."""
        return list(itertools.takewhile(lambda group: group.kind == kind, self._waiting))

    def _wanted(self, alike: list[_Group], size: int) -> Room:
        longest, of_a_device = (
            max(len(group.prompt.tokens) for group in alike),
            -(-len(alike) // self._mesh.size),
        )
        most_tokens = alike[0].kind.sampling.max_tokens
        return room_for(self._model, self._limits, of_a_device, size, longest, most_tokens)

    def _that_suit(self, room: Room, size: int, kind: _Kind) -> list[_Group]:
        """The groups of `_alike` if `room` is large enough for all of them, else []: they get a new room.

        `size` is the most responses of a group in this room.
        """
        alike = self._alike(kind)
        if any(group.size > size for group in alike):
            return []
        wanted = self._wanted(alike, size) if alike else room
        return alike if wanted.slots <= room.slots and wanted.prompt_tokens <= room.prompt_tokens else []

    def _take(self, held: list[Held], room: Room, size: int, kind: _Kind) -> list[list[_Group]]:
        """The next groups for each device, as its line allows; each goes to the least loaded device."""
        new: list[list[_Group]] = [[] for _ in held]
        with self._lock:
            for group in self._that_suit(room, size, kind):
                device = min(
                    range(len(held)), key=lambda i: len(held[i]) + sum(other.size for other in new[i])
                )
                if len(new[device]) == room.line:
                    break
                self._waiting.popleft()
                if group.future.set_running_or_notify_cancel():
                    new[device].append(group)
        return new

    def _inputs(self, new: list[list[_Group]], room: Room) -> Iterator[tuple[Any, ...]]:
        """Yields the inputs of each `prefill_prompts` call: prompts of one padded length and image shape.

        So a prompt's result does not depend on which others are prefilled with it.
        """
        waiting: dict[Any, list[list[_ToPrefill]]] = collections.defaultdict(lambda: [[] for _ in new])
        for device, groups in enumerate(new):
            for at, group in enumerate(groups):
                padded = padded_length(len(group.prompt.tokens), self._limits.prompt_tokens)
                seen = self._see(group.prompt)
                waiting[padded, seen and seen.pixel_shape][device].append(_ToPrefill(at, group, seen))
        for (padded, pixel_shape), of_devices in waiting.items():
            for first in range(0, max(map(len, of_devices)), room.at_once):
                together = [of_device[first : first + room.at_once] for of_device in of_devices]
                images = pixel_shape and self._images(together, room.at_once, padded, pixel_shape)
                prompts = (*self._prompts(together, room.at_once, padded, room.line), images)
                yield jax.device_put(prompts, split_rows(self._mesh))

    def _see(self, prompt: Prompt) -> Seen | None:
        """A prompt's images in rows of 1, 4, 16, … windows: few shapes, so few compilations."""
        if not (self._sight and prompt.images):
            return None
        largest = max(windows_of(grid, self._model.vision) for grid in self._sight.grids_of(prompt))
        return see(
            [prompt],
            self._sight,
            self._model.vision,
            row_windows=4 ** (((largest - 1).bit_length() + 1) // 2),
        )

    def _prompts(
        self, of_devices: list[list[_ToPrefill]], at_once: int, padded: int, nowhere: int
    ) -> tuple[np.ndarray, ...]:
        """Arrays of `at_once` prompts per device; padding rows have the out-of-range place `nowhere`."""
        count = len(of_devices) * at_once
        tokens, (lengths, most, ids) = np.zeros((count, padded), np.int32), np.ones((3, count), np.int32)
        keys, places = np.zeros((count, 2), np.uint32), np.full(count, nowhere, np.int32)
        for device, waiting in enumerate(of_devices):
            for row, (at, group, _) in enumerate(waiting, start=device * at_once):
                n = len(group.prompt.tokens)
                tokens[row, :n], lengths[row], most[row] = group.prompt.tokens, n, group.most_tokens
                places[row], ids[row], keys[row] = at, group.prompt.id, group.key
        return places, tokens, lengths, most, ids, keys

    def _images(
        self, of_devices: list[list[_ToPrefill]], at_once: int, padded: int, pixel_shape: tuple[int, int, int]
    ) -> ImagesInSlots:
        """The images of the same prompts; each prompt has its own rows."""
        V, P, _ = pixel_shape
        # `features` is the number per prompt.
        count, features = len(of_devices) * at_once, V * P // self._model.vision.spatial_merge_size**2
        pixels, feature = [blank_pixels(pixel_shape)] * count, np.full((count, padded), -1, np.int32)
        rope, shift = np.zeros((count, padded, 3), np.int32), np.zeros(count, np.int32)
        for device, waiting in enumerate(of_devices):
            for i, (_, group, seen) in enumerate(waiting):
                row, n = device * at_once + i, len(group.prompt.tokens)
                pixels[row] = seen.pixels()
                feature[row, :n] = np.where(seen.feature[0] >= 0, seen.feature[0] + i * features, -1)
                rope[row, :n], shift[row] = seen.rope[0], seen.following[0] - n
        return ImagesInSlots(Pixels(*map(np.concatenate, zip(*pixels, strict=True))), feature, rope, shift)

    def _give_places(self, new: list[list[_Group]], held: list[Held], most: int) -> Waiting:
        """The responses in line, at most `most` per device, each with a free place."""
        waiting = np.zeros((len(Waiting._fields), len(new), most), np.int32)
        waiting[0] = -1
        for device, (groups, of_device) in enumerate(zip(new, held, strict=True)):
            responses = [(at, group, j) for at, group in enumerate(groups) for j in range(group.size)]
            free = itertools.filterfalse(set(of_device).__contains__, itertools.count())
            for n, ((at, group, j), place) in enumerate(zip(responses, free)):
                of_device[place] = group, j
                waiting[:, device, n] = place, at, group.begun.first + j
        return jax.device_put(Waiting(*waiting.reshape(len(waiting), -1)), split_rows(self._mesh))

    def _hand_out(self, places: Places, held: list[Held]) -> None:
        """Collects finished responses from their places, and answers the groups that are complete."""
        tokens, logp, count, stopped = (np.asarray(x).reshape(len(held), -1, *x.shape[1:]) for x in places)
        for device, of_device in enumerate(held):
            for place in [place for place in of_device if count[device, place]]:
                (group, j), n = of_device.pop(place), count[device, place]
                own = sampled_spans(
                    tokens[device, place, :n].copy(), logp[device, place, :n].copy(),
                    group.kind.policy.version,
                    self._model.vision and self._model.vision.image_token,
                )  # fmt: skip
                finish = finish_of(group.begun, own, bool(stopped[device, place]), group.kind.sampling)
                group.responses[j] = Response(group.begun.spans + own, finish)
                self.sampled += int(n)
                if len(group.responses) == group.size:
                    group.future.set_result(tuple(group.responses[i] for i in range(group.size)))


@functools.lru_cache(maxsize=256)  # each turn of a response is requested by itself
def _key_data(draw: Draw) -> np.ndarray:
    return np.asarray(jax.random.key_data(draw.key()))


class _ToPrefill(NamedTuple):
    """A prompt to prefill: its place in line, and its images."""

    at: int
    group: _Group
    seen: Seen | None


@dataclasses.dataclass(eq=False)
class _Policy:
    """The weights of what was loaded, as sampling reads them. They go with whoever asked for groups of it."""

    weights: Any
    version: int


class _Kind(NamedTuple):
    """What groups that are sampled together have in common."""

    sampling: Sampling
    policy: _Policy  # that was loaded when they were requested; it writes all of their responses


@dataclasses.dataclass(eq=False)
class _Group:
    """A requested group, and its finished responses by index."""

    begun: Begun
    prompt: Prompt  # as it is read, with the tokens of the begun spans
    most_tokens: int  # that the policy may add to a response
    key: np.ndarray  # random key data, uint32 [2]
    size: int
    kind: _Kind
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)
    future: Future[tuple[Response, ...]] = dataclasses.field(default_factory=Future)
