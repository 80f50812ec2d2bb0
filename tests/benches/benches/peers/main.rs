//! The same work on page tables of this project and of other crates.
//!
//! `cargo bench -p quiesce-benches --bench peers` times it. `list` prints the names of
//! all lines; `count NAME` does one line once, with only the work inside `measured`, and
//! prints `@ peer ..`; `time NAME` prints `@ time ..`. `cargo xtask bench --peers` reads
//! these lines.

mod aarch64;
mod frames;
mod multiarch;
mod ours;
mod work;
mod x86;

use std::{env, process::ExitCode};

use criterion::Criterion;

use work::{Line, Table};

/// Everything that can be asked of one peer.
struct Peer {
    name: &'static str,
    count: fn(Line) -> Result<(), String>,
    shortest: fn(Line) -> f64,
    bench: fn(Line, &mut criterion::Bencher<'_>),
}

/// What is known about `T`.
const fn peer<T: Table>() -> Peer {
    Peer {
        name: T::NAME,
        count: work::count::<T>,
        shortest: work::shortest::<T>,
        bench: work::bench::<T>,
    }
}

const PEERS: [Peer; 4] = [
    peer::<ours::Ours>(),
    peer::<x86::X86>(),
    peer::<multiarch::Multiarch>(),
    peer::<aarch64::Aarch64>(),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["list"] => {
            names().for_each(|(_, _, name)| println!("@ line name={name}"));
            Ok(())
        }
        ["count", name] => count(name),
        ["time", name] => time(name),
        _ => {
            bench();
            Ok(())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn names() -> impl Iterator<Item = (Line, &'static Peer, String)> {
    Line::ALL.into_iter().flat_map(|line| {
        PEERS.iter().map(move |peer| (line, peer, format!("{}/{}", line.name(), peer.name)))
    })
}

fn named(name: &str) -> Result<(Line, &'static Peer), String> {
    let found = names().find(|(_, _, known)| known == name);
    found.map(|(line, peer, _)| (line, peer)).ok_or_else(|| format!("no line is called {name}"))
}

fn time(name: &str) -> Result<(), String> {
    let (line, peer) = named(name)?;
    println!("@ time name={name} ns={:.2}", (peer.shortest)(line));
    Ok(())
}

fn count(name: &str) -> Result<(), String> {
    let (line, peer) = named(name)?;
    (peer.count)(line)?;
    println!("@ peer work={} name={} pages={}", line.name(), peer.name, work::PAGES);
    Ok(())
}

fn bench() {
    let mut criterion = Criterion::default().configure_from_args();
    for line in Line::ALL {
        let mut group = criterion.benchmark_group(line.name());
        for peer in &PEERS {
            group.bench_function(peer.name, |bencher| (peer.bench)(line, bencher));
        }
        group.finish();
    }
    criterion.final_summary();
}
