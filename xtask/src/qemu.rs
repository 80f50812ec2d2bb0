//! Boots the testbed in QEMU, one case per boot, and judges how it ended
//!
//! A `Boot` is what one boot left behind: its `Verdict`, its serial output and
//! QEMU's own trace of the invalidation descriptors it carried out. Each has a
//! time limit, and none can take another process down with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::cases::{self, CASES, Case, Expected, Processors};
use crate::checkout;
use crate::progress::Steps;
use crate::records::{self, Record};
use crate::tools::{self, Tool};

mod guest;
mod trace;

pub(crate) use trace::Trace;

/// Exit statuses of QEMU after a write to its debug-exit port: value * 2 + 1.
const PASSED: i32 = 33;
const FAILED: i32 = 35;

/// How many lines of serial output a failure shows.
const TAIL: usize = 30;

/// What `cargo xtask qemu` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print the names of the cases and what each shows, and run nothing
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    guest: guest::GuestArguments,
    /// The cases to run; all of them but `soak` if none is named
    #[arg(value_name = "CASE", value_parser = PossibleValuesParser::new(cases::names()))]
    cases: Vec<String>,
}

/// How a boot ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The case reported success.
    Passed,
    /// The case reported failure.
    Failed,
    /// QEMU ended in any other way.
    Crashed(ExitStatus),
    /// The time limit passed; QEMU was ended.
    Hung,
}

/// What one boot left behind.
pub(crate) struct Boot {
    /// How it ended.
    pub(crate) verdict: Verdict,
    /// Its serial output, and QEMU's own complaints.
    pub(crate) serial: String,
    /// The result lines in the serial output.
    pub(crate) records: Vec<Record>,
    /// What QEMU says it carried out.
    pub(crate) trace: Trace,
    log: PathBuf,
    took: Duration,
}

/// How many cases ended as they should, and how many did not.
#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    /// Cases that ended as expected.
    pub(crate) passed: u64,
    /// Cases that did not.
    pub(crate) failed: u64,
}

/// The testbed, built and ready to boot.
pub(crate) struct Testbed {
    image: PathBuf,
    folder: PathBuf,
}

/// Lists the cases, or runs the named ones, or a guest, as which it ends then.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(code) = guest::run(&arguments.guest) {
        return Ok(code);
    }
    if arguments.list {
        let width = cases::names().map(str::len).max().unwrap_or(0);
        for case in CASES {
            println!("{:width$}  {}", case.name, case.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let named = |case: &&Case| arguments.cases.iter().any(|name| name == case.name);
    let chosen: Vec<&Case> = if arguments.cases.is_empty() {
        cases::ordinary().collect()
    } else {
        CASES.iter().filter(named).collect()
    };
    let tally = run_cases(&Testbed::prepare()?, &chosen)?;
    ensure!(
        tally.failed == 0,
        "{} of {} QEMU cases failed; the paths of their logs are above",
        tally.failed,
        chosen.len()
    );
    Ok(ExitCode::SUCCESS)
}

/// Boots `cases` in QEMU, printing each by name as cargo prints a test.
pub(crate) fn run_cases(testbed: &Testbed, cases: &[&Case]) -> Result<Tally> {
    testbed.check_list()?;
    run_each("qemu", cases, |case| {
        let boot = testbed.boot(case, case.words)?;
        let complaint = (!boot.is_as_expected(case)).then(|| boot.explain(case));
        Ok((boot.took, complaint))
    })
}

/// Runs `cases` in the emulator of this name by `boot`, which says how long it took and what
/// was wrong.
pub(crate) fn run_each(
    emulator: &'static str,
    cases: &[&Case],
    mut boot: impl FnMut(&Case) -> Result<(Duration, Option<String>)>,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let steps = Steps::new(emulator, cases.len());
    println!("\nrunning {} cases in {emulator}", cases.len());
    for case in cases {
        steps.begin(case.name);
        let (took, complaint) = boot(case)?;
        let milliseconds = took.as_millis();
        match complaint {
            None => {
                tally.passed += 1;
                steps.print(&format!("{emulator} {} ... ok ({milliseconds} ms)", case.name));
            }
            Some(complaint) => {
                tally.failed += 1;
                steps.print(&format!("{emulator} {} ... FAILED ({milliseconds} ms)", case.name));
                steps.print(&complaint);
            }
        }
        steps.end();
    }
    drop(steps);
    let word = if tally.failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {word}. {} passed; {} failed; 0 ignored", tally.passed, tally.failed);
    Ok(tally)
}

impl Boot {
    fn is_as_expected(&self, case: &Case) -> bool {
        match case.expected {
            Expected::Pass => self.verdict == Verdict::Passed && self.miscounted().is_none(),
            Expected::Fail => self.verdict == Verdict::Failed,
            Expected::Hang => self.verdict == Verdict::Hung,
        }
    }

    /// What the project counted otherwise than QEMU's trace, over the whole boot.
    pub(crate) fn miscounted(&self) -> Option<String> {
        miscounted(&self.records, &self.trace)
    }

    /// Why the boot was not as expected, with the end of its output.
    pub(crate) fn explain(&self, case: &Case) -> String {
        let ended = match self.verdict {
            Verdict::Passed => match self.miscounted() {
                None => "it reported success".to_owned(),
                Some(what) => format!("it reported success, but {what}"),
            },
            Verdict::Failed => "it reported a failure".to_owned(),
            Verdict::Crashed(status) => format!("QEMU ended with {status}, which is no verdict"),
            Verdict::Hung => format!("it was ended after {} s", case.limit.as_secs()),
        };
        explain(&ended, &self.log, &self.serial)
    }
}

/// How a boot `ended`, with the last lines of its output `text` in the file `log`.
pub(crate) fn explain(ended: &str, log: &Path, text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines.get(lines.len().saturating_sub(TAIL)..).unwrap_or_default();
    format!("    {ended}; the end of {}:\n      {}", log.display(), tail.join("\n      "))
}

impl Testbed {
    /// Finds or installs QEMU and builds the image.
    ///
    /// # Errors
    /// If QEMU is missing and cannot be installed, or the image does not build.
    pub(crate) fn prepare() -> Result<Self> {
        tools::ensure(Tool::Qemu)?;
        let image = build_image()?;
        let folder = checkout::output_folder("qemu")?;
        Ok(Self { image, folder })
    }

    /// Boots `case` with `words` on its command line, and waits for its end.
    ///
    /// # Errors
    /// If QEMU cannot be started or its output cannot be read. A case that fails
    /// is no error here: see [`Boot::verdict`].
    pub(crate) fn boot(&self, case: &Case, words: &str) -> Result<Boot> {
        self.boot_with(case, words, None)
    }

    /// As [`boot`](Self::boot), with the text of a boot module or without one.
    ///
    /// # Errors
    /// As [`boot`](Self::boot), or if the module cannot be written.
    pub(crate) fn boot_with(&self, case: &Case, words: &str, module: Option<&str>) -> Result<Boot> {
        let log = self.folder.join(format!("{}.log", case.name));
        let trace = self.folder.join(format!("{}.trace", case.name));
        let output =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        File::create(&trace).with_context(|| format!("cannot write {}", trace.display()))?;
        let mut command = machine(&self.image, &trace, case);
        if let Some(guest) = case.module {
            command.arg("-initrd").arg(guest::build(guest, &self.folder)?);
        }
        let words = format!("case={} {words}", case.name);
        command.arg("-append").arg(words.trim_end());
        if let Some(text) = module {
            let file = self.folder.join(format!("{}.module", case.name));
            fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
            command.arg("-initrd").arg(file);
        }
        command.stdout(output.try_clone()?).stderr(output);
        let started = Instant::now();
        let verdict = judge(wait(&mut command, case.limit)?);
        let took = started.elapsed();
        let serial = read(&log)?;
        Ok(Boot {
            verdict,
            records: records::parse(&serial),
            trace: Trace::parse(&read(&trace)?),
            serial,
            log,
            took,
        })
    }

    /// Compares the testbed's own list of cases with the table.
    fn check_list(&self) -> Result<()> {
        let list = cases::list();
        let boot = self.boot(&list, "")?;
        if boot.verdict != Verdict::Passed {
            bail!("the testbed cannot list its cases\n{}", boot.explain(&list));
        }
        match disagreement(&boot.records, CASES, None) {
            Some(what) => bail!("testbed and xtask/src/cases.rs disagree: {what}"),
            None => Ok(()),
        }
    }
}

/// Builds the bootable image, for whichever emulator.
///
/// # Errors
/// If it does not build.
pub(crate) fn build_image() -> Result<PathBuf> {
    checkout::build_executable(&[
        "--package=quiesce-testbed",
        "--features=baremetal",
        "--profile=testbed",
    ])
}

/// Where the counters of the line `@ boot` differ from `trace`. A boot that brings the unit
/// up, and so prints `@ iommu`, must have that line; no other need have.
fn miscounted(records: &[Record], trace: &Trace) -> Option<String> {
    let boot = match records::only(records, "boot") {
        Ok(boot) => boot,
        Err(error) => {
            let counts = |record: &Record| matches!(record.kind.as_str(), "iommu" | "boot");
            return records.iter().any(counts).then(|| error.to_string());
        }
    };
    [("iotlb_commands", trace.iotlb_commands()), ("waits", trace.waits())].into_iter().find_map(
        |(name, traced)| match boot.get::<u64>(name) {
            Ok(counted) if counted == traced => None,
            Ok(counted) => Some(format!("it counted {counted} {name}, QEMU's trace has {traced}")),
            Err(error) => Some(error.to_string()),
        },
    )
}

/// What differs between the testbed's own list, lines `@ case=NAME expect=WORD`, and `table`.
///
/// Lines of cases for another machine than QEMU's end in `machine=WORD`: only those of
/// `machine` are compared.
pub(crate) fn disagreement(
    records: &[Record],
    table: &[Case],
    machine: Option<&str>,
) -> Option<String> {
    let here = |record: &&Record| record.get::<String>("machine").ok().as_deref() == machine;
    let pair = |record: &Record| Some((record.get("case").ok()?, record.get("expect").ok()?));
    let held: Vec<(String, String)> = records.iter().filter(here).filter_map(pair).collect();
    for (name, expect) in &held {
        match table.iter().find(|case| case.name == name) {
            None => return Some(format!("`{name}` has no row in the table, so it never runs")),
            Some(case) if case.expected.word() != expect => {
                return Some(format!("`{name}` is to {expect} for the testbed only"));
            }
            Some(_) => {}
        }
    }
    let missing = |case: &&Case| !held.iter().any(|(name, _)| name == case.name);
    let missing = table.iter().find(missing)?;
    Some(format!("`{}` is not in the testbed", missing.name))
}

/// The machine that every case runs on. Software emulation only: the image needs nothing faster.
fn machine(image: &Path, trace: &Path, case: &Case) -> Command {
    let mut device = "intel-iommu,intremap=off,aw-bits=48".to_owned();
    if !case.iommu.is_empty() {
        device.push(',');
        device.push_str(case.iommu);
    }
    // Processors that share one thread take turns: then none waits for long, however busy
    // this machine is.
    const ONE: &[&str] = &["-cpu", "max,+svm"];
    const THREE: &[&str] = &["-smp", "3", "-cpu", "max,+svm"];
    const FOUR: &[&str] = &["-smp", "4", "-cpu", "max,+svm,phys-bits=48"];
    let (threads, processors) = match case.processors {
        Processors::One => ("tcg,thread=single", &[][..]),
        Processors::OneWithGuests => ("tcg,thread=single", ONE),
        Processors::ThreeWithGuests => ("tcg,thread=single", THREE),
        Processors::ThreeInParallel => ("tcg,thread=multi", THREE),
        Processors::FourWithGuests => ("tcg,thread=single", FOUR),
    };
    let mut command = checkout::command(Tool::Qemu.program());
    command
        .args(["-accel", threads, "-machine", "q35", "-m", &case.memory.to_string()])
        .args(["-display", "none", "-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-serial", "stdio"])
        .args(processors)
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .args(["-device", &device])
        .args(["-device", "nvme,serial=quiesce"])
        .args(["-device", "edu,dma_mask=0xffffffffffffffff"])
        .args(["-trace", "vtd_inv_desc_*", "-D"])
        .arg(trace)
        .arg("-kernel")
        .arg(image);
    command
}

/// A child that is ended with its owner, so that no early return leaves one running.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        // Both fail only if the child has ended and been waited for already.
        if self.0.kill().is_ok() {
            self.0.wait().ok();
        }
    }
}

/// Runs `command` for at most `limit`; `None` if it had to be ended.
///
/// # Errors
/// If it cannot be started.
pub(crate) fn wait(command: &mut Command, limit: Duration) -> Result<Option<ExitStatus>> {
    let shown = checkout::line(command);
    let child = command.spawn().with_context(|| format!("cannot start `{shown}`"))?;
    let mut child = Owned(child);
    let started = Instant::now();
    loop {
        if let Some(status) = child.0.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() >= limit {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn judge(ended: Option<ExitStatus>) -> Verdict {
    match ended {
        None => Verdict::Hung,
        Some(status) if status.code() == Some(PASSED) => Verdict::Passed,
        Some(status) if status.code() == Some(FAILED) => Verdict::Failed,
        Some(status) => Verdict::Crashed(status),
    }
}

/// The text of a file, whatever its encoding.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn read(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn ends(script: &str, milliseconds: u64, matches: fn(Verdict) -> bool) {
        let mut command = checkout::command("sh");
        command.args(["-c", script]);
        let ended = wait(&mut command, Duration::from_millis(milliseconds)).expect("started");
        let verdict = judge(ended);
        assert!(matches(verdict), "{script}: {verdict:?}");
    }

    #[test]
    fn only_the_two_agreed_statuses_are_verdicts() {
        ends("exit 33", 10_000, |verdict| verdict == Verdict::Passed);
        ends("exit 35", 10_000, |verdict| verdict == Verdict::Failed);
        ends("exit 0", 10_000, |verdict| matches!(verdict, Verdict::Crashed(_)));
        ends("exit 1", 10_000, |verdict| matches!(verdict, Verdict::Crashed(_)));
        ends("kill -9 $$", 10_000, |verdict| matches!(verdict, Verdict::Crashed(_)));
    }

    #[test]
    fn a_boot_that_does_not_end_is_ended() {
        let started = Instant::now();
        ends("exec sleep 60", 50, |verdict| verdict == Verdict::Hung);
        assert!(started.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_case_can_change_the_emulated_machine() {
        let shown = |case| checkout::line(&machine(Path::new("image"), Path::new("trace"), &case));
        let case = || Case::new("name", "about");
        assert!(shown(case().iommu("caching-mode=on")).contains("aw-bits=48,caching-mode=on "));
        assert!(shown(case()).contains("aw-bits=48 ") && !shown(case()).contains("-smp"));
        assert!(shown(case().guests()).contains("thread=single"));
        assert!(shown(case().guests()).contains("-smp 3 -cpu max,+svm "));
    }

    #[track_caller]
    fn counts(serial: &str, expected: bool) {
        let trace = Trace::parse("vtd_inv_desc_iotlb_global x\nvtd_inv_desc_wait_sw x\n");
        let found = miscounted(&records::parse(serial), &trace);
        assert_eq!(found.is_none(), expected, "{serial}: {found:?}");
    }

    #[test]
    fn a_case_whose_counters_differ_from_the_trace_is_no_success() {
        counts("@ pci=00:01.0\n", true);
        counts("@ boot iotlb_commands=1 waits=1\n", true);
        counts("@ boot iotlb_commands=2 waits=1\n", false);
        counts("@ boot iotlb_commands=1 waits=0\n", false);
        counts("@ boot iotlb_commands=1\n", false);
        counts("@ iommu queue=true\n", false);
        counts("@ boot iotlb_commands=1 waits=1\n@ boot iotlb_commands=1 waits=1\n", false);
    }

    #[track_caller]
    fn agrees(list: &str, expected: bool) {
        let table = &CASES[..1];
        let found = disagreement(&records::parse(list), table, None);
        assert_eq!(found.is_none(), expected, "{list}: {found:?}");
    }

    #[test]
    fn a_case_in_one_of_the_two_lists_is_found() {
        agrees("@ case=boot expect=pass\n  text\n@ case=list verdict=pass\n", true);
        agrees("@ case=boot expect=fail\n", false);
        agrees("@ case=boot expect=pass\n@ case=other expect=pass\n", false);
        agrees("", false);
        agrees("@ case=boot expect=pass\n@ case=other expect=pass machine=bochs\n", true);
        agrees("@ case=boot expect=pass machine=bochs\n", false);
    }
}
