//! The search from the command line, for runs as long as one likes
//!
//! `fuzz TARGET --seconds N --seed S --crash FILE` searches, prints one line
//! `@ fuzz target=.. executions=.. crashes=..`, and writes what it found to FILE.
//! `fuzz TARGET --replay FILE` tells the story of an input and plays it.

use std::{fs, path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use fuzz::{Limit, TARGETS, Target};

/// Throws random inputs at the crates.
#[derive(Parser)]
struct Arguments {
    /// What to throw them at
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(
        TARGETS.iter().map(|target| target.name)
    ))]
    target: String,
    /// How long to search
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Decides the inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where to write an input that breaks a promise
    #[arg(long, value_name = "FILE", default_value = "crash.bin")]
    crash: PathBuf,
    /// Play this input instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seconds", "seed", "crash"])]
    replay: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let target = Target::named(&arguments.target).expect("clap knows the targets");
    let result = match &arguments.replay {
        Some(file) => replay(target, file),
        None => search(target, &arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn replay(target: &Target, file: &PathBuf) -> Result<ExitCode, String> {
    let input =
        fs::read(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    print!("{}", target.tell(&input));
    target.play(&input);
    println!("no promise is broken");
    Ok(ExitCode::SUCCESS)
}

fn search(target: &Target, arguments: &Arguments) -> Result<ExitCode, String> {
    let limit = Limit::Time(Duration::from_secs(arguments.seconds));
    let searched = target.search(arguments.seed, limit);
    let crashes = u32::from(searched.crash.is_some());
    let executions = searched.executions;
    println!("@ fuzz target={} executions={executions} crashes={crashes}", target.name);
    let Some(crash) = searched.crash else { return Ok(ExitCode::SUCCESS) };
    let file = arguments.crash.display();
    let written = fs::write(&arguments.crash, &crash.input);
    written.map_err(|error| format!("cannot write {file}: {error}"))?;
    println!("{}\n{}", crash.message, target.tell(&crash.input));
    Ok(ExitCode::FAILURE)
}
