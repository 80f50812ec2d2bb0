//! Boots the testbed in Bochs, whose processors run guests under EPT
//!
//! QEMU without a hypervisor below it has no VMX, so these cases have a list of
//! their own. The image is the same; GRUB starts it from a disc made for each
//! boot. The exit status of Bochs says nothing: the verdict is the record that
//! the image prints on its serial line.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::cases::{self, BOCHS, Case, Expected};
use crate::checkout;
use crate::qemu::{self, Verdict};
use crate::records::{self, Record};
use crate::tools::{self, Tool};

/// The machine's name in the testbed's list of cases.
const MACHINE: &str = "bochs";

/// How long any boot may take. An unhindered one takes two seconds.
const LIMIT: Duration = Duration::from_secs(120);

/// The machine that every case runs on. Paths are relative to the output folder.
///
/// Its clock goes by instructions, few to the second: firmware and GRUB spend seconds on
/// waiting, and the image's own limits are generous.
const CONFIGURATION: &str = "\
cpu: model=corei7_skylake_x, count=3, ips=4000000, reset_on_triple_fault=0
memory: guest=256, host=256
romimage: file=$BXSHARE/BIOS-bochs-latest
vgaromimage: file=$BXSHARE/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path=disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
sound: waveoutdrv=dummy, waveindrv=dummy, midioutdrv=dummy
clock: sync=none
panic: action=fatal
error: action=report
info: action=report
debug: action=ignore
log: bochs.txt
display_library: term
";

/// What the debugger that is part of Bochs is told: to go on.
const DEBUGGER: &str = "continue\n";

/// What `cargo xtask bochs` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print the names of the cases and what each shows, and run nothing
    #[arg(long)]
    list: bool,
    /// The cases to run; all of them if none is named
    #[arg(value_name = "CASE", value_parser = PossibleValuesParser::new(cases::bochs_names()))]
    cases: Vec<String>,
}

/// What one boot left behind.
struct Boot {
    verdict: Verdict,
    serial: String,
    records: Vec<Record>,
    log: PathBuf,
    took: Duration,
}

/// The testbed, built and ready to boot.
struct Testbed {
    /// Where discs are made and Bochs runs.
    folder: PathBuf,
}

/// Lists the cases, or runs the named ones.
///
/// # Errors
/// If Bochs or what makes a disc is missing, the image does not build, or a case does not end
/// as it should.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.list {
        let width = cases::bochs_names().map(str::len).max().unwrap_or(0);
        for case in BOCHS {
            println!("{:width$}  {}", case.name, case.about);
        }
        return Ok(());
    }
    let chosen = |case: &&Case| {
        arguments.cases.is_empty() || arguments.cases.iter().any(|name| name == case.name)
    };
    let chosen: Vec<&Case> = BOCHS.iter().filter(chosen).collect();
    let testbed = Testbed::prepare()?;
    testbed.check_list()?;
    let tally = qemu::run_each(MACHINE, &chosen, |case| {
        let boot = testbed.boot(case)?;
        let complaint = (!boot.is_as_expected(case)).then(|| boot.explain());
        Ok((boot.took, complaint))
    })?;
    ensure!(
        tally.failed == 0,
        "{} of {} Bochs cases failed; the paths of their logs are above",
        tally.failed,
        chosen.len()
    );
    Ok(())
}

impl Boot {
    fn is_as_expected(&self, case: &Case) -> bool {
        match case.expected {
            Expected::Pass => self.verdict == Verdict::Passed,
            Expected::Fail => self.verdict == Verdict::Failed,
            Expected::Hang => self.verdict == Verdict::Hung,
        }
    }

    fn explain(&self) -> String {
        let ended = match self.verdict {
            Verdict::Passed => "it reported success".to_owned(),
            Verdict::Failed => "it reported a failure".to_owned(),
            Verdict::Crashed(status) => format!("Bochs ended with {status} and no verdict"),
            Verdict::Hung => format!("it was ended after {} s", LIMIT.as_secs()),
        };
        qemu::explain(&ended, &self.log, &self.serial)
    }
}

impl Testbed {
    /// Finds or installs what is needed, and builds the image.
    fn prepare() -> Result<Self> {
        tools::ensure(Tool::Bochs)?;
        tools::ensure(Tool::Grub)?;
        let image = qemu::build_image()?;
        let folder = checkout::output_folder("bochs")?;
        let grub = folder.join("disc/boot/grub");
        fs::create_dir_all(&grub).with_context(|| format!("cannot create {}", grub.display()))?;
        let copy = folder.join("disc/boot/testbed");
        let mut bytes =
            fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?;
        hide_sections(&mut bytes)?;
        fs::write(&copy, bytes).with_context(|| format!("cannot write {}", copy.display()))?;
        write(&folder.join("machine.txt"), CONFIGURATION)?;
        write(&folder.join("debugger.txt"), DEBUGGER)?;
        Ok(Self { folder })
    }

    /// Boots `case` and waits for its end. A case that fails is no error here.
    fn boot(&self, case: &Case) -> Result<Boot> {
        let words = format!("case={} {}", case.name, case.words);
        write(&self.folder.join("disc/boot/grub/grub.cfg"), &menu(words.trim_end()))?;
        self.make_disc()?;
        let serial = self.folder.join("serial.txt");
        write(&serial, "")?;
        let started = Instant::now();
        let ended = qemu::wait(&mut self.machine(case)?, LIMIT)?;
        let took = started.elapsed();
        let log = self.folder.join(format!("{}.log", case.name));
        fs::rename(&serial, &log).with_context(|| format!("cannot write {}", log.display()))?;
        let serial = qemu::read(&log)?;
        let records = records::parse(&serial);
        let verdict = judge(ended, &records, case.name);
        Ok(Boot { verdict, serial, records, log, took })
    }

    /// Makes the disc that GRUB starts from, with no more of GRUB on it than it takes.
    fn make_disc(&self) -> Result<()> {
        let mut command = checkout::command(Tool::Grub.program());
        command
            .current_dir(&self.folder)
            .args(["--directory=/usr/lib/grub/i386-pc", "--output=disc.iso"])
            .arg("--install-modules=multiboot2 iso9660 biosdisk normal")
            .args(["--locales=", "--fonts=", "--themes=", "disc"]);
        let shown = checkout::line(&command);
        let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
        if !output.status.success() {
            bail!("`{shown}` failed:\n{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    /// Bochs, with its chatter in a file. Its display is a terminal that it makes itself.
    fn machine(&self, case: &Case) -> Result<Command> {
        let chatter = self.folder.join(format!("{}.chatter", case.name));
        let output = fs::File::create(&chatter)
            .with_context(|| format!("cannot write {}", chatter.display()))?;
        let mut command = checkout::command(Tool::Bochs.program());
        command
            .current_dir(&self.folder)
            .env("TERM", "linux")
            .args(["-q", "-f", "machine.txt", "-rc", "debugger.txt"])
            .stdout(output.try_clone()?)
            .stderr(output);
        Ok(command)
    }

    /// Compares the testbed's own list of cases with the table.
    fn check_list(&self) -> Result<()> {
        let list = cases::list();
        let boot = self.boot(&list)?;
        if boot.verdict != Verdict::Passed {
            bail!("the testbed cannot list its cases\n{}", boot.explain());
        }
        match qemu::disagreement(&boot.records, BOCHS, Some(MACHINE)) {
            Some(what) => bail!("testbed and xtask/src/cases.rs disagree: {what}"),
            None => Ok(()),
        }
    }
}

/// Makes an ELF file of 64 bits say that it has no sections, only segments: GRUB would read
/// every symbol through an emulated drive.
fn hide_sections(file: &mut [u8]) -> Result<()> {
    /// Where the table of sections is, how many there are, and which has their names.
    const FIELDS: [Range<usize>; 2] = [0x28..0x30, 0x3c..0x40];
    for field in FIELDS {
        file.get_mut(field).context("the image is no ELF file: it ends in its header")?.fill(0);
    }
    Ok(())
}

/// What GRUB is told: to start the image with `words` at once.
fn menu(words: &str) -> String {
    format!("set timeout=0\nmultiboot2 /boot/testbed {words}\nboot\n")
}

/// How a boot of the case `name` ended: the one verdict it printed counts, if it then ended.
fn judge(ended: Option<ExitStatus>, records: &[Record], name: &str) -> Verdict {
    let Some(status) = ended else { return Verdict::Hung };
    let of_case = |record: &&Record| record.get::<String>("case").is_ok_and(|case| case == name);
    let verdicts: Vec<String> =
        records.iter().filter(of_case).filter_map(|record| record.get("verdict").ok()).collect();
    match verdicts.as_slice() {
        [word] if word == "pass" => Verdict::Passed,
        [word] if word == "fail" => Verdict::Failed,
        _ => Verdict::Crashed(status),
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[track_caller]
    fn judged(serial: &str, expected: Verdict) {
        let status = ExitStatus::from_raw(1 << 8);
        assert_eq!(judge(Some(status), &records::parse(serial), "boot"), expected, "{serial}");
        assert_eq!(judge(None, &records::parse(serial), "boot"), Verdict::Hung, "{serial}");
    }

    #[test]
    fn the_one_verdict_of_the_case_counts_and_the_exit_status_does_not() {
        let crashed = Verdict::Crashed(ExitStatus::from_raw(1 << 8));
        judged("@ case=boot verdict=pass\r\nPASS boot\r\n", Verdict::Passed);
        judged("@ case=boot verdict=fail\r\nFAIL boot: why\r\n", Verdict::Failed);
        judged("", crashed);
        judged("PASS boot\r\n", crashed);
        judged("@ case=other verdict=pass\r\n", crashed);
        judged("@ case=boot verdict=pass\r\n@ case=boot verdict=pass\r\n", crashed);
        judged("@ case=boot verdict=perhaps\r\n", crashed);
    }

    #[test]
    fn only_the_fields_about_sections_are_cleared() {
        let mut file = [0xff; 0x80];
        hide_sections(&mut file).expect("long enough");
        let cleared: Vec<usize> = (0..file.len()).filter(|at| file[*at] == 0).collect();
        assert_eq!(cleared, (0x28..0x30).chain(0x3c..0x40).collect::<Vec<_>>());
        assert!(hide_sections(&mut [0xff; 0x3f]).is_err());
    }

    #[test]
    fn the_command_line_reaches_grub() {
        assert!(menu("case=boot a=b").contains("/boot/testbed case=boot a=b\nboot\n"));
    }
}
