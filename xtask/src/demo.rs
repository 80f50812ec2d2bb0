//! `cargo xtask demo`: the same unmap under three policies, side by side
//!
//! A `Row` is what one policy cost on one kind of hardware. The demo does not
//! only print rows: it checks them against what each policy must cost, and fails
//! if the software model and QEMU disagree.

mod expect;
mod model;
mod qemu;
mod row;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::progress::Steps;
use crate::tools::{self, Tool};
use row::{Policy, Row};

/// What `cargo xtask demo` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Where to run; without it, the model, then QEMU if it is there or can be installed
    #[arg(long, value_enum)]
    hw: Option<Where>,
    /// How many grants to unmap
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    grants: u32,
    /// Print one JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    /// The software model, which can hold stale entries
    Model,
    /// QEMU, with an emulated VT-d unit and an NVMe controller
    Qemu,
    /// Both, and compare them
    Both,
}

/// Runs the demo and checks its figures.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let qemu = match arguments.hw {
        Some(Where::Model) => false,
        Some(Where::Qemu | Where::Both) => {
            tools::ensure(Tool::Qemu)?;
            true
        }
        None => match tools::ensure(Tool::Qemu) {
            Ok(()) => true,
            Err(missing) => {
                eprintln!("only the software model is run: {missing:#}");
                false
            }
        },
    };
    let mut rows = Vec::new();
    if arguments.hw != Some(Where::Qemu) {
        let one = |policy| Ok(model::run(policy, arguments.grants));
        rows.extend(each_policy("model", one)?);
    }
    if qemu {
        let demo = qemu::Demo::prepare(arguments.grants)?;
        rows.extend(each_policy("QEMU", |policy| demo.run(policy))?);
    }
    if arguments.json {
        println!("{}", row::json(&rows)?);
    } else {
        println!("{}", row::table(&rows, arguments.grants));
    }
    expect::check(&rows)
}

/// Runs one row for each policy, with progress.
fn each_policy(hardware: &'static str, run: impl Fn(Policy) -> Result<Row>) -> Result<Vec<Row>> {
    let steps = Steps::new(hardware, Policy::ALL.len());
    let one = |policy: Policy| {
        steps.begin(policy.name());
        let row = run(policy);
        steps.end();
        row
    };
    Policy::ALL.into_iter().map(one).collect()
}
