"""The in-process engine: each device samples in slots, which are freed and filled again. No server, no second process.

What is asked waits in line. A thread reads the prompts that have waited longest, and the devices give their responses slots as these
become free. A group is handed out when its last response has ended. So a long response holds up no slot but its own.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bapo_jax.groups import Prompt, Response
from bapo_jax.models.patches import Pixels, blank_pixels, windows_of
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.rollout.engine import Draw, Engine, RolloutError, Sampling, trained_tokens
from bapo_jax.rollout.room import Limits, Room, padded_length, room_for
from bapo_jax.rollout.slots import Images, Places, lay_out, nothing_yet, read, sample, split_rows
from bapo_jax.seen import Seen, Sight, see

_STEPS = 256  # most tokens of a slot between two looks at what has ended

Held = dict[int, tuple['_Group', int]]  # the places of a device that are taken: whose response, and which of the group's


class JaxEngine(Engine):
    """`graph` is the model's nnx graph; `stop_tokens` end a response; `limits` are those of each device of `mesh`.

    `sight` gives the images of prompts, `attention` is as of `slots.ways_of`. Weights and slots take memory only while something is asked, and slots as much as that needs
    (room.py).
    """

    servers = 0

    def __init__(
        self, graph: nnx.GraphDef, model: ModelConfig, stop_tokens: tuple[int, ...], limits: Limits, mesh: Mesh | None = None,
        sight: Sight | None = None, attention: str = 'auto',
    ):  # fmt: skip
        self._graph, self._model, self._stop_tokens = graph, model, stop_tokens
        self._sight, self._attention = sight, attention
        self._mesh = mesh or Mesh(jax.devices()[:1], 'rows')
        self._limits = limits
        self._params, self._weights, self._version = None, None, None
        self._waiting: collections.deque[_Group] = collections.deque()
        self._lock = threading.Lock()  # of `_waiting` and `_weights`
        self._thread = ThreadPoolExecutor(1, thread_name_prefix='sampler')
        self._closed = False
        self.sampled = self.room = 0  # tokens so far, and how many the slots had room for meanwhile

    def load(self, params: Any, version: int) -> None:
        with self._lock:  # all that was asked is answered, but the thread may not have let the weights go yet
            self._params, self._version, self._weights = params, version, None

    def ask(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        if self._params is None:
            raise RuntimeError('the engine holds no policy yet: call load(params, version) before generate')
        key_of = {draw: np.asarray(jax.random.key_data(draw.key())) for draw in set(draws)}
        asked = [
            _Group(prompt, key_of[draw], group_size, sampling, self._version) for prompt, draw in zip(prompts, draws, strict=True)
        ]
        with self._lock:
            # Devices exchange parts of weights here. The learner's programs exchange too, so one thread must order both.
            if self._weights is None:
                self._weights = lay_out(self._params, model=self._model, mesh=self._mesh)
            self._waiting.extend(asked)
        self._thread.submit(self._answer_all)
        return [group.future for group in asked]

    def close(self) -> None:
        self._closed = True
        with self._lock:
            for group in self._waiting:
                if group.future.cancel():
                    group.future.set_running_or_notify_cancel()  # wakes those who wait for it
            self._waiting.clear()
        self._thread.shutdown()
        self._params = None

    def _answer_all(self) -> None:
        """Answers all that wait. Then the weights are let go."""
        while self._waiting:
            held: list[Held] = [{} for _ in range(self._mesh.size)]
            try:
                self._answer(self._waiting[0].size, self._waiting[0].sampling, held)
                if self._closed:
                    raise RolloutError('the engine was closed')
            except Exception as e:  # those who wait for an answer get the error in its place
                with self._lock:
                    lost = {group for of_device in held for group, _ in of_device.values()} | set(self._waiting)
                    self._waiting.clear()
                for group in lost:
                    if group.future.running() or group.future.set_running_or_notify_cancel():
                        group.future.set_exception(e)
        with self._lock:
            if not self._waiting:
                self._weights = None

    def _answer(self, size: int, sampling: Sampling, held: list[Held]) -> None:
        """Answers the first in line, and those behind them that ask for as many responses, sampled alike."""
        with self._lock:
            room = self._wanted(self._alike(size, sampling), size, sampling)
        settings = {'graph': self._graph, 'mesh': self._mesh}
        rows, places, line = nothing_yet(
            model=self._model, mesh=self._mesh, rows=self._limits.slots, places=room.slots + room.line * size, line=room.line,
            prompt_tokens=room.prompt_tokens, response_tokens=sampling.max_tokens, cached=room.slots, key_slots=room.key_slots,
        )  # fmt: skip
        begun = wanted = np.zeros(len(held), np.int32)
        while not self._closed:
            if (begun == wanted).all():
                new = self._take(held, room, size, sampling)
                if not any(new) and not any(held):
                    return
                begun, wanted = np.zeros_like(begun), np.array([size * len(groups) for groups in new], np.int32)
                to = self._give_places(new, held, room.line, size)
                for prompts in self._inputs(new, room):
                    line = read(self._weights, line, *prompts, **settings)
            # No slot stands empty while more wait that this room suits. At the end half of the rest is waited for, so that groups come
            # out early.
            with self._lock:
                more = bool(self._that_suit(room, size, sampling))
            few = np.array([room.slots if more else min(room.slots, len(of_device)) // 2 for of_device in held], np.int32)
            rows, places, begun, steps = sample(
                self._weights, rows, places, line, to, *jax.device_put((begun, few), split_rows(self._mesh)), jnp.int32(_STEPS),
                jnp.float32(sampling.temperature or 1), jnp.float32(sampling.top_p), **settings,
                stop_tokens=self._stop_tokens, greedy=sampling.temperature == 0,
                nucleus=sampling.temperature > 0 and sampling.top_p < 1, attention=self._attention,
            )  # fmt: skip
            begun, steps = np.asarray(begun), np.asarray(steps)
            self.room += int(steps.max()) * room.slots * self._mesh.size
            self._hand_out(places, held)
        raise RolloutError('the engine was closed before it had answered')

    def _alike(self, size: int, sampling: Sampling) -> list[_Group]:
        """Those at the head of the line that ask for this."""
        return list(itertools.takewhile(lambda group: (group.size, group.sampling) == (size, sampling), self._waiting))

    def _wanted(self, alike: list[_Group], size: int, sampling: Sampling) -> Room:
        longest, of_a_device = max(len(group.prompt.tokens) for group in alike), -(-len(alike) // self._mesh.size)
        return room_for(self._model, self._limits, of_a_device, size, longest, sampling.max_tokens)

    def _that_suit(self, room: Room, size: int, sampling: Sampling) -> list[_Group]:
        """Those at the head of the line that ask for this, if there is room for all of them. Else another room is made for them."""
        alike = self._alike(size, sampling)
        wanted = self._wanted(alike, size, sampling) if alike else room
        return alike if wanted.slots <= room.slots and wanted.prompt_tokens <= room.prompt_tokens else []

    def _take(self, held: list[Held], room: Room, size: int, sampling: Sampling) -> list[list[_Group]]:
        """The next groups of each device, as many as its line holds; those that wait go to the device that has least to do."""
        new: list[list[_Group]] = [[] for _ in held]
        with self._lock:
            for group in self._that_suit(room, size, sampling):
                device = min(range(len(held)), key=lambda i: len(held[i]) + size * len(new[i]))
                if len(new[device]) == room.line:
                    break
                self._waiting.popleft()
                if group.future.set_running_or_notify_cancel():
                    new[device].append(group)
        return new

    def _inputs(self, new: list[list[_Group]], room: Room) -> Iterator[tuple[Any, ...]]:
        """What `read` is given, call by call: prompts of one padded length, so that none is computed otherwise for its company.

        The same goes for rows of images.
        """
        waiting: dict[Any, list[list[_Waiting]]] = collections.defaultdict(lambda: [[] for _ in new])
        for device, groups in enumerate(new):
            for at, group in enumerate(groups):
                padded = padded_length(len(group.prompt.tokens), self._limits.prompt_tokens)
                seen = self._see(group.prompt)
                waiting[padded, seen and seen.pixel_shape][device].append(_Waiting(at, group, seen))
        for (padded, pixel_shape), of_devices in waiting.items():
            for first in range(0, max(map(len, of_devices)), room.at_once):
                together = [of_device[first : first + room.at_once] for of_device in of_devices]
                images = pixel_shape and self._images(together, room.at_once, padded, pixel_shape)
                prompts = (*self._prompts(together, room.at_once, padded, room.line), images)
                yield jax.device_put(prompts, split_rows(self._mesh))

    def _see(self, prompt: Prompt) -> Seen | None:
        """A prompt's images in rows of 1, 4, 16, … windows: few shapes, so few programs."""
        if not (self._sight and prompt.images):
            return None
        largest = max(windows_of(grid, self._model.vision) for grid in self._sight.grids_of(prompt))
        return see([prompt], self._sight, self._model.vision, row_windows=4 ** (((largest - 1).bit_length() + 1) // 2))

    def _prompts(self, of_devices: list[list[_Waiting]], at_once: int, padded: int, nowhere: int) -> tuple[np.ndarray, ...]:
        """Arrays of as many prompts for each device; fillers go nowhere."""
        count = len(of_devices) * at_once
        tokens, lengths, ids = np.zeros((count, padded), np.int32), np.ones(count, np.int32), np.zeros(count, np.int32)
        keys, places = np.zeros((count, 2), np.uint32), np.full(count, nowhere, np.int32)
        for device, waiting in enumerate(of_devices):
            for row, (at, group, _) in enumerate(waiting, start=device * at_once):
                n = len(group.prompt.tokens)
                tokens[row, :n], lengths[row] = group.prompt.tokens, n
                places[row], ids[row], keys[row] = at, group.prompt.id, group.key
        return places, tokens, lengths, ids, keys

    def _images(self, of_devices: list[list[_Waiting]], at_once: int, padded: int, pixel_shape: tuple[int, int, int]) -> Images:
        """The images of the same prompts, each prompt's in rows of its own."""
        V, P, _ = pixel_shape
        count, features = len(of_devices) * at_once, V * P // self._model.vision.spatial_merge_size**2  # of a prompt
        pixels, feature = [blank_pixels(pixel_shape)] * count, np.full((count, padded), -1, np.int32)
        rope, shift = np.zeros((count, padded, 3), np.int32), np.zeros(count, np.int32)
        for device, waiting in enumerate(of_devices):
            for i, (_, group, seen) in enumerate(waiting):
                row, n = device * at_once + i, len(group.prompt.tokens)
                pixels[row] = seen.pixels()
                feature[row, :n] = np.where(seen.feature[0] >= 0, seen.feature[0] + i * features, -1)
                rope[row, :n], shift[row] = seen.rope[0], seen.following[0] - n
        return Images(Pixels(*map(np.concatenate, zip(*pixels, strict=True))), feature, rope, shift)

    def _give_places(self, new: list[list[_Group]], held: list[Held], places_in_line: int, size: int) -> jax.Array:
        """A free place for each response to the prompts in line, [devices · places in line, size]; -1 behind the last prompt."""
        places = np.full((len(new), places_in_line, size), -1, np.int32)
        for groups, of_device, places_PxG in zip(new, held, places, strict=True):
            free = itertools.filterfalse(set(of_device).__contains__, itertools.count())
            for group, places_G in zip(groups, places_PxG, strict=False):
                places_G[:] = list(itertools.islice(free, size))
                of_device |= {place: (group, j) for j, place in enumerate(places_G.tolist())}
        return jax.device_put(places.reshape(-1, size), split_rows(self._mesh))

    def _hand_out(self, places: Places, held: list[Held]) -> None:
        """Takes responses that have ended from their places. A group whose last one has ended is answered."""
        tokens, logp, count, stopped = (np.asarray(x).reshape(len(held), -1, *x.shape[1:]) for x in places)
        for device, of_device in enumerate(held):
            for place in [place for place in of_device if count[device, place]]:
                (group, j), n = of_device.pop(place), count[device, place]
                finish = 'stop' if stopped[device, place] else 'length'
                own = tokens[device, place, :n].copy()
                mask = trained_tokens(own, self._model.vision and self._model.vision.image_token)
                group.responses[j] = Response(own, logp[device, place, :n].copy(), finish, group.version, loss_mask=mask)
                self.sampled += int(n)
                if len(group.responses) == group.size:
                    group.future.set_result(tuple(group.responses[i] for i in range(group.size)))


class _Waiting(NamedTuple):
    """A prompt that is to be read: its place in line, and its images."""

    at: int
    group: _Group
    seen: Seen | None


@dataclasses.dataclass(eq=False)
class _Group:
    """A group that is wanted, and its responses so far, by their number."""

    prompt: Prompt
    key: np.ndarray  # random key data, uint32 [2]
    size: int
    sampling: Sampling
    version: int
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)
    future: Future[tuple[Response, ...]] = dataclasses.field(default_factory=Future)
