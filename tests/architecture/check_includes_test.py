"""The checker finds each rule broken once in a made-up tree."""

import pathlib
import subprocess
import sys
import tempfile

CHECKER = pathlib.Path(__file__).with_name("check_includes.py")
BROKEN = {
    "src/core/a.h": '#include "cpu/plan/shape.h"\n',
    "src/core/b.h": "#include <hwy/highway.h>\n",
    "src/cpu/c.h": '#include "reference/reference.h"\n',
    "src/cpu/d.h": "#include <cuda_runtime.h>\n",
    "src/core/e.h": '#include "api/run.h"\n',
    "cli/f.cpp": '#include "core/problem.h"\n',
    "examples/g.c": '#include "../src/core/problem.h"\n',
    "include/logitless/h.h": "#include <hwy/base.h>\n",
    "cli/io/k.h": '#include "commands/units.h"\n',
    "cli/support/l.h": '#include "options.h"\n',
    "examples/o.cpp": '#include "io/npy.h"\n',
    "src/cuda/p.cpp": '#include "cuda/engines/sm90/engine.h"\n',
    "src/cuda/engines/portable/q.cu": '#include "cuda/engines/sm90/launch.h"\n',
    "src/cuda/run/exact/r.cpp": '#include "cuda/run/sparsified/s.h"\n',
    "src/cuda/t.cu": "double z_loss;\n",
    "src/cuda/u.h": "struct U {\n  float scale, softcap;\n};\n",
    "src/cuda/engines/fused/v.cuh": "acc[r >> 1][0] = 0;\n",
    "src/reference/j.cpp": '#include "logitless/logitless.h"\n',
}
FINE = {
    "src/core/problem.h": "#include <vector>\n",
    "src/api/run.cpp": '#include "core/problem.h"\n#include "cpu/plan/shape.h"\n#include "logitless/logitless.h"\n',
    "src/cpu/plan/shape.h": '#include "core/problem.h"\n#include <hwy/highway.h>\n#include "cpu/other.h"\n',
    "src/cuda/k.cu": "#include <cuda_runtime.h>\n",
    "src/cuda/engines/engines.cpp": '#include "cuda/engines/sm90/engine.h"\n',
    "src/cuda/engines/sm90/launch.cu": '#include "cuda/engines/sm90/launch.h"\n',
    "src/core/loss.h": "double z_loss;\n",
    "src/cuda/engines/fused/accumulators.cuh": "acc[r >> 1][0] = 0;\n",
    "cli/main.cpp": '#include <logitless/logitless.hpp>\n#include "io/npy.h"\n#include "run.h"\n',
    "cli/commands/loss.cpp": '#include "commands/context.h"\n#include "support/format.h"\n',
    "cli/io/npy.h": '#include "io/file.h"\n#include "support/interrupt.h"\n',
    "examples/model.cpp": "#include <logitless/logitless.hpp>\n",
}

with tempfile.TemporaryDirectory() as folder:
    for name, text in {**BROKEN, **FINE, **{f"tests/{i}.py": "" for i in range(30)}}.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    result = subprocess.run([sys.executable, CHECKER, folder], capture_output=True, text=True)
reported = {line.split(":")[0] for line in result.stdout.splitlines() if ": " in line}
assert result.returncode == 1, result.stdout + result.stderr
assert reported == set(BROKEN), f"not seen: {set(BROKEN) - reported}; wrongly seen: {reported - set(BROKEN)}"
