"""Legal but unusual tensor names and types in safetensors: '/', ':', spaces, '..', leading dot, a name of 300 characters, upper/lower pairs,
names that end like MindSpore's own states; bool, u8..u64, i64 beyond 2^53, f64, complex-free; int buffers that a cast must not touch.
Usage: this program OUT. Right: every form keeps names, types, bytes; --dtype bf16 changes f32/f64 only; a form that cannot hold a type says which."""
import os, sys
import numpy as np
from safetensors.numpy import save_file
o = sys.argv[1]
t = {"params/encoder/layer_0/kernel": np.arange(6, dtype="f4").reshape(2, 3), "a:b c": np.arange(3, dtype="f4"), "../up": np.ones(2, "f4"), ".dot": np.ones(2, "f4"),
     "n" * 300: np.ones(1, "f4"), "W": np.zeros(2, "f4"), "w": np.ones(2, "f4"), "moment1_like.adam_m.x": np.ones(2, "f4"), "quote'\"\\x": np.ones(1, "f4")}
types = {"position_ids": np.array([[0, 2**53 + 1, 2**62]], "i8"), "mask": np.array([True, False]), "u8": np.arange(3, dtype="u1"), "u16": np.array([65535], "u2"), "u32": np.array([2**32 - 1], "u4"),
         "u64": np.array([2**64 - 1], "u8"), "f64": np.array([1 / 3], "f8"), "i8": np.array([-128], "i1"), "i16": np.array([-32768], "i2")}
for k, d in (("names", t), ("types", types), ("both", {**t, **types})):
    os.makedirs(f"{o}/{k}"); save_file(d, f"{o}/{k}/model.safetensors")
