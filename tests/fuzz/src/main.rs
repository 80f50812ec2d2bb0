//! The search from the command line, for runs as long as one likes
//!
//! `fuzz TARGET --seconds N --seed S --crash FILE` searches, prints one line
//! `@ fuzz target=.. executions=.. crashes=..`, and writes what it found to FILE, and as a
//! scenario to FILE with the extension `toml`; a line `@ scenario seed=..` follows if that
//! fails as well. `fuzz TARGET --replay FILE` tells the story of an input and plays it.

use std::{fs, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, builder::PossibleValuesParser};
use fuzz::{Crash, Limit, Plant, Search, TARGETS, Target};
use scenarios::plants::{self, PLANTS};

/// Throws random inputs at the crates.
#[derive(Parser)]
struct Arguments {
    /// What to throw them at
    #[arg(value_parser = PossibleValuesParser::new(TARGETS.iter().map(|target| target.name)))]
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
    /// Plant a bug in the hardware, or in the embedding
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(
        PLANTS.iter().filter(|plant| plant.is_of_a_world()).map(|plant| plant.name)
    ))]
    plant: Option<String>,
    /// Play this input instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seconds", "seed", "crash"])]
    replay: Option<PathBuf>,
}

/// How long an input that breaks a promise is made smaller.
const SHRINKING: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let target = Target::named(&arguments.target).expect("clap knows the targets");
    run(target, &arguments).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(target: &'static Target, arguments: &Arguments) -> Result<ExitCode, String> {
    let plant = arguments.plant.as_deref().and_then(plants::named);
    if let Some(plant) = plant.filter(|_| !target.has_hardware()) {
        let with = TARGETS.iter().filter(|target| target.has_hardware());
        let with: Vec<&str> = with.map(|target| target.name).collect();
        let (name, plant, with) = (target.name, plant.name, with.join(", "));
        return Err(format!("{name} has no hardware for {plant} to be planted in; {with} have"));
    }
    match &arguments.replay {
        Some(file) => replay(target, file, plant),
        None => search(target, arguments, plant),
    }
}

fn replay(
    target: &Target,
    file: &PathBuf,
    plant: Option<&'static Plant>,
) -> Result<ExitCode, String> {
    let input =
        fs::read(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    if file.extension().is_some_and(|extension| extension == "toml") {
        let text = String::from_utf8(input);
        let text = text.map_err(|error| format!("{} is no text: {error}", file.display()))?;
        target.play_text(&text).map_err(|error| error.to_string())?;
        println!("no promise is broken");
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", target.tell(&input));
    target.play(&input, plant);
    println!("no promise is broken");
    Ok(ExitCode::SUCCESS)
}

fn search(
    target: &'static Target,
    arguments: &Arguments,
    plant: Option<&'static Plant>,
) -> Result<ExitCode, String> {
    let searched = target.search(Search {
        seed: arguments.seed,
        limit: Limit::Time(Duration::from_secs(arguments.seconds)),
        shrinking: SHRINKING,
        plant,
    });
    let crashes = u32::from(searched.crash.is_some());
    let executions = searched.executions;
    println!("@ fuzz target={} executions={executions} crashes={crashes}", target.name);
    let Some(crash) = searched.crash else { return Ok(ExitCode::SUCCESS) };
    write(&arguments.crash, &crash.input)?;
    println!("{}\n{}", crash.message, target.tell(&crash.input));
    write_scenario(target, &crash, &arguments.crash, plant)?;
    Ok(ExitCode::FAILURE)
}

fn write(file: &PathBuf, bytes: &[u8]) -> Result<(), String> {
    fs::write(file, bytes).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

fn write_scenario(
    target: &Target,
    crash: &Crash,
    input: &std::path::Path,
    plant: Option<&'static Plant>,
) -> Result<(), String> {
    let Some(scenario) = target.scenario(&crash.input, plant) else {
        println!("It is bytes, and no scenario.");
        return Ok(());
    };
    let file = input.with_extension("toml");
    write(&file, scenario.text.as_bytes())?;
    if scenario.left_out > 0 {
        println!("{} step(s) are left out of the scenario, which says why.", scenario.left_out);
    }
    match scenario.seed {
        Some(seed) => println!("@ scenario seed={seed}"),
        None => println!("The scenario passes: it does not show what the input does."),
    }
    Ok(())
}
