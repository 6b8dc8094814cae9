"""The checker finds each fault in a made-up tree, and nothing in a sound one."""

import pathlib
import subprocess
import sys
import tempfile

CHECKER = pathlib.Path(__file__).with_name("check_words.py")
LONG = " ".join(["word"] * 46) + ".\n"
BROKEN = {
    "src/a.h": "// Of the rows, those that count.\n",
    "src/b.cpp": "int a;  /" + "/ What a row is.\n",
    "src/c.py": '"""The same for columns."""\n',
    "cli/d.cpp": "/* Those of the caller. */\n",
    "docs/e.md": "The sums are told.\n",
    "docs/f.md": "It is fast, too.\n",
    "docs/g.md": "Rows are 2026-01-01 old.\n",
    "docs/h.md": LONG,
    "docs/i.md": "It works. What it does is a secret.\n",
    "docs/j.md": "A sum takes 3F.\n",
    "CONTRIBUTING.md": "Ask when asked for.\n",
    "README.md": "Word. " * 451,
}
FINE = {
    "src/k.h": "// Rows that count.\n// What is a row?\nint of;  // columns\n",
    "src/l.py": '"""Sums of rows."""\n',
    "docs/m.md": "```sh\n# What asked for told.\n```\n\n| Of | told |\n|---|---|\n\nSee [it](told.md), `asked for`.\n",
    "docs/results.md": "Measured on 2026-01-01.\n",
    "README.md": "Rows count.\n",
}


def run(files, *names):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return subprocess.run([sys.executable, CHECKER, folder, *names], capture_output=True, text=True)


def main():
    for name, text in BROKEN.items():
        done = run(FINE | {name: text})
        assert done.returncode == 1 and name in done.stdout, (name, done.stdout, done.stderr)
    done = run(FINE)
    assert done.returncode == 0, done.stdout + done.stderr
    many = {f"docs/{number}.md": "Rows count here. " * 2_600 for number in range(4)}
    assert "words of guides" in run(FINE | many).stdout.splitlines()[0]
    print(f"{len(BROKEN) + 2} trees")


if __name__ == "__main__":
    main()
