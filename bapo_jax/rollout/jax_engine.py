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
from bapo_jax.models.decoding import cache_slots
from bapo_jax.models.patches import Pixels, blank_pixels, windows_of
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.rollout.engine import Draw, Engine, RolloutError, Sampling, trained_tokens
from bapo_jax.rollout.slots import BLOCK, Images, Places, lay_out, nothing_yet, read, sample, split_rows
from bapo_jax.seen import Seen, Sight, see

_SHORTEST = 128  # prompts are padded to a power of two from here on: few shapes, so few programs
_LINE = 4  # so many times more prompts wait in a device's line than fill its slots
_READ = 8  # prompts that a device reads at once
_STEPS = 256  # most tokens of a slot between two looks at what has ended

Held = dict[int, tuple['_Group', int]]  # the places of a device that are taken: whose response, and which of the group's


class JaxEngine(Engine):
    """`graph` is the model's nnx graph; `stop_tokens` end a response; all devices of `mesh` together sample up to `rows` at once.

    No prompt is longer than `prompt_tokens`; `sight` gives their images. Weights and slots take memory only while something is asked.
    """

    servers = 0

    def __init__(
        self, graph: nnx.GraphDef, model: ModelConfig, stop_tokens: tuple[int, ...], rows: int, prompt_tokens: int,
        mesh: Mesh | None = None, sight: Sight | None = None,
    ):  # fmt: skip
        self._graph, self._model, self._stop_tokens, self._prompt_tokens = graph, model, stop_tokens, prompt_tokens
        self._sight = sight
        self._mesh = mesh or Mesh(jax.devices()[:1], 'rows')
        self._slots = max(1, rows // self._mesh.size)  # of a device
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
        places_in_line = max(1, _LINE * self._slots // size)  # of a device, for prompts
        settings = {'graph': self._graph, 'mesh': self._mesh}
        rows, places, line = nothing_yet(
            model=self._model, mesh=self._mesh, rows=self._slots, places=self._slots + places_in_line * size,
            line=places_in_line, prompt_tokens=self._prompt_tokens, response_tokens=sampling.max_tokens,
        )  # fmt: skip
        begun = wanted = np.zeros(len(held), np.int32)
        while not self._closed:
            if (begun == wanted).all():
                new = self._take(held, places_in_line, size, sampling)
                if not any(new) and not any(held):
                    return
                begun, wanted = np.zeros_like(begun), np.array([size * len(groups) for groups in new], np.int32)
                to = self._give_places(new, held, places_in_line, size)
                for prompts in self._inputs(new, places_in_line):
                    line = read(self._weights, line, *prompts, **settings)
            # No slot stands empty while more wait. At the end half of the rest is waited for, so that groups come out early.
            more = self._next_is(size, sampling)
            few = np.array([self._slots if more else min(self._slots, len(of_device)) // 2 for of_device in held], np.int32)
            rows, places, begun, steps = sample(
                self._weights, rows, places, line, to, *jax.device_put((begun, few), split_rows(self._mesh)), jnp.int32(_STEPS),
                jnp.float32(sampling.temperature), jnp.float32(sampling.top_p), **settings,
                stop_tokens=self._stop_tokens, nucleus=sampling.top_p < 1,
            )  # fmt: skip
            begun, steps = np.asarray(begun), np.asarray(steps)
            self.room += int(steps.max()) * self._slots * self._mesh.size
            self._hand_out(places, held)
        raise RolloutError('the engine was closed before it had answered')

    def _next_is(self, size: int, sampling: Sampling) -> bool:
        """Whether the first in line asks for this."""
        return bool(self._waiting) and (self._waiting[0].size, self._waiting[0].sampling) == (size, sampling)

    def _take(self, held: list[Held], most: int, size: int, sampling: Sampling) -> list[list[_Group]]:
        """The next groups of each device, up to `most`; those that wait go to the device that has least to do."""
        new: list[list[_Group]] = [[] for _ in held]
        with self._lock:
            while self._next_is(size, sampling):
                device = min(range(len(held)), key=lambda i: len(held[i]) + size * len(new[i]))
                if len(new[device]) == most:
                    break
                group = self._waiting.popleft()
                if group.future.set_running_or_notify_cancel():
                    new[device].append(group)
        return new

    def _inputs(self, new: list[list[_Group]], places_in_line: int) -> Iterator[tuple[Any, ...]]:
        """What `read` is given, call by call: prompts of one padded length, so that none is computed otherwise for its company.

        The same goes for rows of images.
        """
        waiting: dict[Any, list[list[_Waiting]]] = collections.defaultdict(lambda: [[] for _ in new])
        for device, groups in enumerate(new):
            for at, group in enumerate(groups):
                padded = min(self._prompt_tokens, max(_SHORTEST, 1 << (len(group.prompt.tokens) - 1).bit_length()))
                seen = self._see(group.prompt)
                waiting[padded, seen and seen.pixel_shape][device].append(_Waiting(at, group, seen))
        at_once = min(_READ, places_in_line)
        for (padded, pixel_shape), of_devices in waiting.items():
            for first in range(0, max(map(len, of_devices)), at_once):
                together = [of_device[first : first + at_once] for of_device in of_devices]
                images = pixel_shape and self._images(together, at_once, padded, pixel_shape)
                prompts = (*self._prompts(together, at_once, padded, places_in_line), images)
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


def memory_of(model: ModelConfig, parameters: int, *, slots: int, group_size: int, prompt_tokens: int, response_tokens: int) -> int:
    """Bytes that sampling takes on a device of `slots`; `parameters` is the size of a whole float32 copy of them.

    Whole weights in the compute dtype, keys and values of the slots and of the prompts in line, responses, and the larger of a
    layer's activations while prompts are read and of the scores over the vocabulary.
    """
    b, line = jnp.dtype(model.dtype).itemsize, max(1, _LINE * slots // group_size)  # prompts
    of_a_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * b
    kept = slots * cache_slots(prompt_tokens + response_tokens) + line * prompt_tokens
    responses = 8 * (slots + line * group_size) * response_tokens
    wide = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * model.num_heads * model.head_dim
    words = model.vocab_size if model.vocab_size <= BLOCK else -(-model.vocab_size // BLOCK) * BLOCK
    at_work = max(min(_READ, line) * prompt_tokens * wide * b, 4 * 4 * slots * words)
    return parameters * b // 4 + kept * of_a_token + responses + at_work


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
