//! Guests under EPT: exits, leaves of all sizes, violations, INVEPT.
//!
//! These cases boot in Bochs. What other processors hold of a guest is in `stale`.

mod bench;
mod stale;

use flush::{Gfn, Mfn, Run};
use p2m::hardware::vmx::{AccessedDirty, Eptp, InveptError, Scope};
use p2m::{EnterError, PageKind};
use stage2::Access;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::vmx::Rights;

use self::bench::{Bench, CODE, Done};
use super::{Case, Expect};
use crate::machine::Machine;
use crate::vmx::{Command, Exit, VmxProcessor};
use crate::{memory, say};

/// Cases that need processors with VMX and no remapping unit.
pub(super) static CASES: &[Case] = &[
    Case {
        name: "vmx-run",
        expect: Expect::Pass,
        summary: "a guest of a few instructions runs under EPT, exit by exit",
        run: exits,
    },
    Case {
        name: "ept-violation",
        expect: Expect::Pass,
        summary: "each forbidden access exits, and the qualification says which and why",
        run: violations,
    },
    Case {
        name: "ept-leaves",
        expect: Expect::Pass,
        summary: "leaves of 4 KiB, 2 MiB and 1 GiB show their first, middle and last page",
        run: leaves,
    },
    Case {
        name: "ept-split",
        expect: Expect::Pass,
        summary: "a page leaves a large leaf: it is gone, its neighbours are not",
        run: splits,
    },
    Case {
        name: "invept",
        expect: Expect::Pass,
        summary: "both types succeed, a bad operand fails; an entry executes it once a flush",
        run: invept,
    },
    Case {
        name: "ept-stale-shown",
        expect: Expect::Pass,
        summary: "without a flush, a processor in its guest reads a page that was cleared",
        run: stale::shown,
    },
    Case {
        name: "ept-stale-flushed",
        expect: Expect::Pass,
        summary: "a kick and INVEPT end that: no read after the release",
        run: stale::flushed,
    },
    Case {
        name: "ept-batch",
        expect: Expect::Pass,
        summary: "32 pages in one batch: one kick and one INVEPT a processor, not 32",
        run: stale::batched,
    },
    Case {
        name: "ept-stale-large",
        expect: Expect::Pass,
        summary: "the same for one page of a 2 MiB and of a 1 GiB leaf",
        run: stale::large,
    },
    Case {
        name: "ept-rights-lowered",
        expect: Expect::Pass,
        summary: "the same for a right: writes land until the flush, not after",
        run: stale::rights,
    },
    Case {
        name: "ept-no-kick-is-stale",
        expect: Expect::Pass,
        summary: "a planted bug: a flush kicks nobody, and both processors read a released page",
        run: stale::no_kick,
    },
    Case {
        name: "ept-no-kick-is-a-failure",
        expect: Expect::Fail,
        summary: "the check of ept-stale-flushed fails with that bug",
        run: stale::no_kick_is_found,
    },
];

/// One exit of each sort, and what survives it.
fn exits(_: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    ensure!(VmxProcessor::turn_on().is_err(), "VMX could be turned on twice");
    let bench = Bench::new(&processor)?;
    let vcpu = &mut bench.vcpu(&processor)?;
    ensure!(vcpu.run(&bench.guest.cpus)? == Exit::Call, "the guest did not begin");
    vcpu.registers.rsi = 0x89ab_cdef;
    vcpu.registers.r8_to_r15 = [8, 9, 10, 11, 12, 13, 14, 15];
    for (command, exit) in [(Command::Halt, Exit::Halt), (Command::Identify, Exit::Identify)] {
        vcpu.answer(command, 0x1234_5678, 0x9abc, 0xdef0)?;
        let found = vcpu.run(&bench.guest.cpus)?;
        ensure!(found == exit, "{command:?} ended with {found:?}");
        let registers = vcpu.registers;
        ensure!(
            (registers.rbx, registers.rcx, registers.rdx) == (0x1234_5678, 0x9abc, 0xdef0)
                && registers.rsi == 0x89ab_cdef
                && registers.r8_to_r15 == [8, 9, 10, 11, 12, 13, 14, 15],
            "registers changed on the way: {registers:x?}"
        );
        vcpu.skip()?;
        ensure!(vcpu.run(&bench.guest.cpus)? == Exit::Call, "the guest did not go on");
    }
    vcpu.answer(Command::Undefined, 0, 0, 0)?;
    let found = vcpu.run(&bench.guest.cpus)?;
    ensure!(found == Exit::Exception(6), "an undefined instruction ended with {found:?}");
    say!("@ vmx exits=6");
    Ok(())
}

/// Reads, writes and fetches that the tables forbid.
fn violations(_: &Machine) -> Result<(), Failure> {
    const NOTHING: Gfn = Gfn::new(0x200);
    const PAGE: Gfn = Gfn::new(0x201);
    let processor = VmxProcessor::turn_on()?;
    let bench = Bench::new(&processor)?;
    let vcpu = &mut bench.vcpu(&processor)?;
    let local = bench.guest.local(&processor)?;
    let tlb = bench.guest.tlb(&local);
    let mut count = 0_u64;
    let mut all = |gfn: Gfn, allowed: Rights, may: [bool; 3]| {
        let commands = [
            (Command::Read, Rights::READ),
            (Command::Write, Rights::WRITE),
            (Command::Execute, Rights::EXECUTE),
        ];
        for ((command, access), may) in commands.into_iter().zip(may) {
            // Not at the start of the page: the address is that of the access.
            let at = (gfn.get() << 12) + 8;
            let done = bench.ask(vcpu, command, at)?;
            match (may, done) {
                (true, Done::Value(_)) => {}
                (false, Done::Violation { at: where_, linear, what }) => {
                    ensure!(where_ == at && linear == Some(at), "{at:#x} was told as {where_:#x}");
                    ensure!(what.last_step, "the guest has no tables of its own");
                    ensure!(
                        what.access == access && what.allowed == allowed,
                        "{command:?} with {allowed:?} was told as {what:?}"
                    );
                    count += 1;
                }
                (_, done) => {
                    testbed::fail!("{command:?} of {gfn:?} with {allowed:?}: {done:?}");
                }
            }
        }
        Ok::<_, Failure>(())
    };
    all(NOTHING, Rights::NONE, [false, false, false])?;
    let page = bench.guest.populate(PAGE, 0)?;
    bench::put_return(page)?;
    all(PAGE, Rights::ALL, [true, true, true])?;
    bench::put_return(page)?;
    for (allowed, rights, may) in [
        (Access::READ_WRITE, Rights::READ_WRITE, [true, true, false]),
        (Access::READ, Rights::READ, [true, false, false]),
        (Access::ALL.without(Access::WRITE), Rights::READ_EXECUTE, [true, false, true]),
    ] {
        bench.guest.restrict(Run::single(PAGE), allowed, &tlb, || Ok(()))?;
        bench::put_return(page)?;
        all(PAGE, rights, may)?;
    }
    // A grant is never executable, a read-only one not writable either.
    for (gfn, kind, rights, may) in [
        (0x300, PageKind::GrantReadWrite, Rights::READ_WRITE, [true, true, false]),
        (0x301, PageKind::GrantReadOnly, Rights::READ, [true, false, false]),
    ] {
        bench.guest.show(Gfn::new(gfn), 0, memory::allocate()?, kind)?;
        all(Gfn::new(gfn), rights, may)?;
    }
    say!("@ ept_violations count={count}");
    Ok(())
}

/// A large leaf: where it is, its order, and the frame it shows first.
fn large_leaves(bench: &Bench) -> Result<[(Gfn, u8, Mfn); 2], Failure> {
    const TWO_MIB: Gfn = Gfn::new(0x800);
    const ONE_GIB: Gfn = Gfn::new(0x4_0000);
    let two = bench.guest.populate(TWO_MIB, 9)?;
    // No block of 1 GiB is free on this machine, so the leaf shows the first GiB, as far
    // as there is memory. The guest uses frames of its own through it, and no others.
    bench.guest.show(ONE_GIB, 18, Mfn::new(0), PageKind::RamReadWrite)?;
    for (gfn, order) in [(TWO_MIB, 9), (ONE_GIB, 18)] {
        let run = bench.guest.lookup(gfn).context("a large leaf")?.run;
        ensure!(run.pages() == 1 << order, "the leaf at {gfn:?} has {} pages", run.pages());
    }
    Ok([(TWO_MIB, 9, two), (ONE_GIB, 18, Mfn::new(0))])
}

/// Frames behind a large leaf that the guest may use.
fn places(first: Mfn, order: u8) -> Result<[Mfn; 3], Failure> {
    if order == 9 {
        return Ok([0, 5, 511].map(|place| Mfn::new(first.get() + place)));
    }
    Ok([memory::allocate()?, memory::allocate()?, memory::allocate()?])
}

/// Leaves of every size show what they should.
fn leaves(_: &Machine) -> Result<(), Failure> {
    const PAGE: Gfn = Gfn::new(0x300);
    let processor = VmxProcessor::turn_on()?;
    let bench = Bench::new(&processor)?;
    let vcpu = &mut bench.vcpu(&processor)?;
    let page = bench.guest.populate(PAGE, 0)?;
    ensure!(bench.reaches(vcpu, PAGE, page)?, "a page is out of reach");
    for (start, order, first) in large_leaves(&bench)? {
        for frame in places(first, order)? {
            let gfn = Gfn::new(start.get() + frame.get() - first.get());
            ensure!(bench.reaches(vcpu, gfn, frame)?, "{gfn:?} does not show {frame:?}");
        }
        let past = Gfn::new(start.get() + (1 << order));
        let done = bench.ask(vcpu, Command::Read, past.get() << 12)?;
        ensure!(matches!(done, Done::Violation { .. }), "there is something behind: {done:?}");
    }
    say!("@ ept_leaves kib=4 mib=2 gib=1");
    Ok(())
}

/// A page leaves each large leaf.
fn splits(_: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let bench = Bench::new(&processor)?;
    let vcpu = &mut bench.vcpu(&processor)?;
    let local = bench.guest.local(&processor)?;
    let tlb = bench.guest.tlb(&local);
    for (start, order, first) in large_leaves(&bench)? {
        let frames = places(first, order)?;
        let number = |frame: Mfn| Gfn::new(start.get() + frame.get() - first.get());
        for frame in frames {
            ensure!(bench.reaches(vcpu, number(frame), frame)?, "{frame:?} is out of reach");
        }
        let [before, gone, after] = frames;
        let taken = bench.guest.take(number(gone), &tlb, |_| Ok(()))?;
        ensure!(taken == gone, "{taken:?} was taken instead of {gone:?}");
        let done = bench.ask(vcpu, Command::Write, number(gone).get() << 12)?;
        let Done::Violation { what, .. } = done else {
            testbed::fail!("the page is still in reach: {done:?}");
        };
        ensure!(what.access == Rights::WRITE && what.allowed == Rights::NONE, "{what:?}");
        for frame in [before, after] {
            let pages = bench.guest.lookup(number(frame)).context("a neighbour")?.run.pages();
            ensure!(pages < 1 << order, "the leaf was not split");
            ensure!(bench.reaches(vcpu, number(frame), frame)?, "{frame:?} is lost");
        }
        memory::release(taken)?;
    }
    let counts = bench.guest.cpus.counts();
    ensure!(counts.flushes == 2 && counts.at_entry == 3, "{counts:?}");
    say!("@ ept_split flushes={} invept={}", counts.flushes, counts.at_entry);
    Ok(())
}

/// INVEPT succeeds, fails, and is executed exactly when it should be.
fn invept(_: &Machine) -> Result<(), Failure> {
    const PAGE: Gfn = Gfn::new(0x300);
    let processor = VmxProcessor::turn_on()?;
    let bench = Bench::new(&processor)?;
    let good = Scope::SingleContext(bench.guest.eptp()?);
    let root = Mfn::new(bench.guest.eptp()?.bits() >> 12);
    // This processor has no tables of five levels.
    let five = Eptp::new(root, 5, AccessedDirty::Off).context("a pointer")?;
    let bad = Scope::SingleContext(five);
    let invept = |scope| processor.invept(scope);
    ensure!(invept(good) == Ok(()) && invept(Scope::AllContexts) == Ok(()), "INVEPT fails");
    ensure!(invept(bad) == Err(InveptError::Invalid), "{:?} with no VMCS", invept(bad));
    let vcpu = &mut bench.vcpu(&processor)?;
    ensure!(invept(good) == Ok(()) && invept(Scope::AllContexts) == Ok(()), "INVEPT fails");
    ensure!(invept(bad) == Err(InveptError::Valid), "{:?} with a VMCS", invept(bad));

    // An entry executes it: the processor refuses, so the guest is not entered.
    let cpus = &bench.guest.cpus;
    let refused = cpus.enter(0, &processor.local(five));
    ensure!(refused == Err(EnterError::Invalidate(InveptError::Valid)), "{refused:?}");
    ensure!(cpus.running().is_empty() && !cpus.may_hold(0), "the processor counts as inside");

    let local = bench.guest.local(&processor)?;
    let tlb = bench.guest.tlb(&local);
    let tried = cpus.counts().at_entry;
    let executed = || cpus.counts().at_entry - tried;
    for round in 1..=20 {
        let page = bench.guest.populate(PAGE, 0)?;
        for _ in 0..3 {
            ensure!(bench.reaches(vcpu, PAGE, page)?, "the page is out of reach");
        }
        // Once for what ran here before, then once a flush; adding a page is none.
        ensure!(executed() == round, "{} INVEPTs in round {round}", executed());
        ensure!(cpus.may_hold(0), "a processor that ran the guest holds nothing");
        memory::release(bench.guest.take(PAGE, &tlb, |_| Ok(()))?)?;
        ensure!(executed() == round, "INVEPT outside of an entry");
        ensure!(!cpus.may_hold(0), "a flush left a processor unmarked");
    }
    ensure!(bench.guest.lookup(CODE).is_some(), "the program is gone");
    say!("@ invept executed={}", executed());
    Ok(())
}
