//! Runs one part of the work on a batch, to be counted.
//!
//! `list` prints the names of all parts; `count NAME` runs one, with only the part inside
//! [`measured`], and prints `@ part ..`. `cargo xtask bench --parts` reads these lines.

use std::{env, hint::black_box, process::ExitCode};

use host::parts::{Part, Ready};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["list"] => Part::all().iter().for_each(|part| println!("@ line name={}", part.name())),
        ["count", name] => {
            let Some(part) = Part::named(name) else {
                eprintln!("no part is called {name}; `list` prints the names");
                return ExitCode::FAILURE;
            };
            let mut ready = part.prepare();
            black_box(measured(black_box(&mut ready)));
            ready.finish();
            println!("@ part name={name} pages={}", part.pages());
        }
        _ => {
            eprintln!("usage: parts_cost list | count NAME");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Holds nothing but the part: what instructions are counted of.
#[inline(never)]
fn measured(ready: &mut Ready) -> u64 {
    ready.run()
}
