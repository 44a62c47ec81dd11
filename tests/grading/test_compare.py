"""The judge of "correct", one rule at a time: a table of verdicts, hostile text, the worker process, the real files."""

import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import answers
from answers import equivalent, extract_answer, gsm8k_gold, is_correct, last_boxed, normalise

ROOT = Path(answers.__file__).parent

# gold <- answer: right; gold </- answer: wrong. A heading is the reason for the verdicts below it.
TABLE = r"""
# a number is its value, however written
18 <- 18
18 <- 18.0
18 <- 18.
18 <- +18
18 <- 018
18 <- 18.000
18 <- 36/2
18 <- \frac{36}{2}
033 <- 33
0.5 <- .5
0.5 <- 1/2
0.5 <- \frac12
0 <- -0
-3 <- -3.0
7.10 <- 7.1
-\frac{1}{2} <- -1/2
-\frac{1}{2} <- \frac{-1}{2}
-\frac{1}{2} <- \frac{1}{-2}
-\frac{1}{2} <- -0.5
\frac{3}{4} <- \frac{6}{8}
\frac{3}{4} <- 0.75
\frac{3}{4} <- (3/4)
0.1\overline{6} <- \frac16
0.\overline{3} <- \frac{1}{3}
# a mixed number is a sum, with the sign in front of both
1\frac{1}{2} <- 3/2
1\frac12 <- 1.5
1\frac12 <- 1 1/2
-15\frac{3}{5} <- -15.6
33 \frac{1}{3} <- \frac{100}{3}
1\frac12 </- \frac12
1\frac12 </- 1\cdot\frac12
# powers of ten, words and scales
120000 <- 1.2 \times 10^5
120000 <- 1.2e5
120000 <- 1.2*10^{5}
120000 <- 12 \cdot 10^4
0.00012 <- 1.2\times10^{-4}
3.0 \times 10^8 <- 300000000
10^{-5} <- 0.00001
5 \text{ million} <- 5000000
5000000 <- 5 million
5 \text{ million} </- 5
1000 </- 10^2
\mbox{four} <- 4
7 <- seven
7 </- eight
18 </- eighteen hundred
# thousands separators, in strict groups
1,234 <- 1234
1234 <- 1,234
1234 <- 1{,}234
1234 <- 1,\!234
1234 <- 1\,234
11,\! 111,\! 111,\! 100 <- 11111111100
1234567 <- 1,234,567
1,234.5 <- 1234.5
1234 </- 1,23,4
1234 </- 1,2345
1234 </- 12,34
1234 </- 1.234
\dfrac{2469}{20,\!000} <- 0.12345
# another number is wrong
18 </- 118
18 </- -18
18 </- 81
18 </- 1 8
18 </- 18 18
18 </- 18.004
18 </- 18.000000001
18 </- 17.9999999999
18 </- 1_8
18 </- 0x12
18 </- ١٨
5 </- 500
5 </- 0.05
5 </- 50
25 </- 52
\frac12 </- \frac21
\frac12 </- -\frac12
10^{20} </- 10^{20}+1
# two decimals are compared without a tolerance
0.1 </- 0.10000000001
1 </- 0.9999999999
1 </- 1.0000000000001
# a decimal stands for a value it rounds only from ten digits on
\frac{1}{12} <- 0.0833333333333
\frac{2}{3} <- 0.6666666667
\frac{2}{3} <- 0.6666666666
\frac{\sqrt{3}}{2} <- 0.8660254037844386
10\pi <- 31.4159265359
\frac13 </- 0.333
\frac13 </- 0.33333333
\frac23 </- 0.67
\frac23 </- 0.6666666688
\sqrt{2} </- 1.414
\pi </- 3.14
\pi </- 22/7
# neighbours are multiplied, never added, but for a mixed number
37 </- 18 19
37 </- {19}18
37 </- (18)(19)
342 <- (18)(19)
6\sin x <- 2(3)\sin x
\frac{5}{3}\pi <- 1\frac{2}{3}\pi
\frac{5}{2} </- 3\frac{-1}{2}
6 <- 3\frac{6}{3}*1.2
# no absolute rounding, no float: 1/2^99 is not 1/2^98
\frac{1}{2^{99}} </- \frac{1}{2^{98}}
\frac{1}{2^{99}} </- 0
10^{-12} </- 0
2^{100} </- 2^{100}+1
2^{4950} </- 2^{4951}
\pi </- \pi+10^{-50}
1-\frac{1}{e} </- 1+\frac{1}{e}
\frac{1}{2004!} </- \frac{1}{2005!}
# delimiters, bold, boxes and prose are no part of the answer
18 <- $18$
18 <- $$18$$
18 <- \(18\)
18 <- \[ 18 \]
18 <- \boxed{18}
18 <- $\boxed{18}$
18 <- \fbox{18}
18 <- \boxed{\text{18}}
18 <- x = \boxed{18}
18 <- **18**
18 <- `18`
18 <- "18"
18 <- The answer is 18.
18 <- The answer is **18**.
18 <- The final answer is: $\boxed{18}$.
18 <- **Answer:** 18
18 <- Answer: 18
18 <- So the answer is 18
18 <- Therefore, the final answer is $18$.
18 <- = 18
18 <- \text{18}
18 <- \mathbf{18}
18 <- {18}
18 <- (18)
18 <- \displaystyle 18
18 <- 18,
18 <- 18;
18 <- 18\quad
18 <- 18\text{.}
# white space around it neither
18 <-   18  
\frac{1}{2} <- \frac { 1 } { 2 }
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <- \begin{pmatrix}1\\2\end{pmatrix}
# several answers are no answer
18 </- 18 or 20
18 </- 18, 20
18 </- 18 and 20
18 </- \text{18 or 19}
18 </- {18, 19}
18 </- x = 18 or x = 20
18 </- 18?20
18 </- 18 20
18 </- \boxed{18} or \boxed{20}
18 </- \boxed{18}\boxed{20}
18 </- \boxed{20} 18
18 </- between 18 and 18
# a denial or a remark is no answer
18 </- not 18
18 </- The answer is not 18
18 </- 18 is wrong
18 </- x is not = 18
18 </- 18\text{ maybe 19}
18 </- \text{correct}
18 </- \text{the same as the gold answer}
# nothing is no answer
18 </- $
18 </- \boxed{}
18 </- .
18 </- x
# LaTeX spellings of one thing
\frac12 <- \frac{1}{2}
\frac12 <- \dfrac{1}{2}
\frac12 <- \tfrac12
\frac12 <- \cfrac{1}{2}
\frac12 <- \frac 12
\frac12 <- \frac 1 2
\frac12 <- \frac1{2}
\frac12 <- \frac{1}2
\frac{270}7 <- \frac{270}{7}
\frac{\sqrt6}3 <- \frac{\sqrt{6}}{3}
\frac\pi 2 <- \frac{\pi}{2}
\sqrt2 <- \sqrt{2}
\sqrt 2 <- \sqrt{2}
\sqrt10 <- \sqrt{10}
\left(3,4\right) <- (3,4)
\left[-\frac{1}{2}, 3\right) <- [-1/2,3)
x \le 5 <- x \leq 5
\emptyset <- \varnothing
1 + 274i <- 1+274\mathrm{i}
2^{2005} <- 2^2005
x^{10} <- x^10
# plain-text mathematics
\sqrt{2} <- sqrt(2)
\sqrt{2} <- \sqrt(2)
\sqrt{2} <- sqrt{2}
2\sqrt{3} <- 2*sqrt(3)
2\sqrt{3} <- 2 \cdot \sqrt{3}
\pi <- pi
\frac{\pi}{4} <- pi/4
\frac34\pi <- 3/4 \pi
y = -\frac{1}{2} x^2 + 4x - 6 <- y = -1/2 x^2 + 4x - 6
\frac{11x + 5}{x - 2} <- (11x+5)/(x-2)
\frac{1}{4m} <- 1/(4m)
\frac{x}{2} <- 1/2x
\frac{1}{2^{10}} <- 1/2^10
\infty <- infinity
\sin x <- sin(x)
\sqrt{x} <- x^(1/2)
x^2 <- x**2
x \le 5 <- x <= 5
# Unicode
1-\sqrt{2} <- 1 − √2
2\sqrt{3} <- 2√3
\pi <- π
-\infty <- -∞
x \le 5 <- x ≤ 5
12 <- ３×４
18 <- １８
x^2 <- x²
1\frac12 <- 1½
(3,4) <- （3，4）
90 <- 90°
x \in [-2,7] <- x ∈ [−2, 7]
5 </- 5²
25 <- 5²
# a percent sign may be missing, or be worked out; it does not move the point by itself
10\% <- 10
10\% <- 10%
10\% <- 10 percent
10\% <- 10\text{ percent}
10\% <- 0.1
10\% <- \frac{1}{10}
10 <- 10\%
1/2 <- 50\%
10\% </- 1
10\% </- 0.01
10\% </- 100
0.5 </- 50
50 </- 0.5
# a chain is worth its last member, if its members agree
0.56 = 56\% <- 56\%
0.56 = 56\% <- 0.56
5 <- 2+3=5
5 <- x=2+3=5
\$\dfrac23 \approx \$0.67 <- \frac23
18 </- 18 = 19
19 </- 18 = 19
# degrees are a unit of an angle and a factor inside a function
90^\circ <- 90
90^\circ <- 90 degrees
90^{\circ} <- 90^\circ
45^\circ, 135^\circ <- 135^\circ,45^\circ
(6,235^\circ) <- (6,235)
\tan 15^\circ <- 2-\sqrt{3}
\sin 30^\circ <- \frac{1}{2}
\sin 15^\circ </- \sin 15
\frac{\pi}{2} </- 90^\circ
# currency signs
\$18 <- 18
18 <- \$18
18 <- $18
18 <- 18$
18 <- \$18.00
18 <- €18
\$1,250 <- 1250
-\$0.50 <- -0.5
1.85\ \text{USD} <- \$1.85
# a unit may be missing
18 <- 18 dollars
18 <- 18 ducks
18 <- 18\text{ ways}
18 <- 18 years old
5\text{ cm} <- 5
5\text{ cm}^2 <- 5
7 \text{ days} <- 7
\frac{3}{4}\pi\text{ inches} <- \frac{3\pi}{4}
6\frac{1}{6}\text{ feet} <- \frac{37}{6}
14 \text{ right triangles} <- 14
480 + 480\sqrt{3}\text{ feet} <- 480(1+\sqrt{3})
\approx 8.24 \text{ mph} <- 8.24
11 <- 11th
11 <- 11^{\text{th}}
8\!:\!34 \text{ p.m.} <- 8:34
2\text{ miles} </- 3 miles
18 </- 18 plus 2
18 </- 18 thousand
18 </- 18 dozens
# the same unit may be spelled differently
5\text{ cm} <- 5 cm
5\text{ cm} <- 5cm
5\text{ cm} <- 5 centimeters
5\text{ cm} <- 5\,\mathrm{cm}
5\text{ cm}^2 <- 5 square centimeters
5\text{ cm}^2 <- 5\text{ cm}^{2}
10\text{ inches} <- 10 in
17\text{ meters} <- 17 m
17\text{ meters} <- 17m
144 \mbox{ m}^3 <- 144 m^3
25 \text{ ft} <- 25 feet
45\text{ mph} <- 45 miles per hour
6:00 PM <- 6:00 p.m.
8\!:\!34 \text{ p.m.} <- 8:34 PM
# another unit is wrong
5\text{ cm} </- 5 m
5\text{ cm} </- 5\text{ km}
5\text{ cm} </- 5 cm^2
7 \text{ days} </- 7 hours
6:00 PM </- 6:00 AM
9\text{ a.m.} </- 9 p.m.
# a letter is a variable, not a unit
2s </- 2
2 </- 2s
2k </- 2
14k </- 14
5x </- 5
5 </- 5x
# words
\text{even} <- even
\text{even} <- Even.
\text{even} <- \textbf{even}
\text{Monday} <- monday
\text{yes} <- Yes
\text{two lines} <- two lines
\text{ellipse} <- an ellipse
\text{June 20} <- June 20
\text{No solution} <- no solution
\text{CBAD} <- CBAD
\text{even} </- odd
\text{even} </- not even
\text{even} </- 2
\text{Monday} </- Sunday
\text{June 20} </- June 2
\text{yes} </- no
\text{circle} </- ellipse
\text{CBAD} </- ABCD
\text{ACF} </- AFC
\text{ACF} </- A, C
# choices
\text{(A)} <- A
\text{(A)} <- (A)
\text{(A)} <- \text{A}
\text{(A)} <- A.
(\text{E}) <- E
\text{(E)}, <- E
A <- (A)
\text{A} <- Option (A)
\text{A,B} <- B and A
\text{A, D, F, G, H} <- A,D,F,G,H
\text{(A)} </- B
\text{(A)} </- (B)
\text{A} </- A, B
# a list of words is a ranking
\text{Softball, Kickball, Picnic} <- Softball, Kickball, Picnic
\text{Softball, Kickball, Picnic} </- Picnic, Kickball, Softball
# a name in front of the value may be missing
x=5 <- 5
5 <- x=5
5 <- x = 5
k = \frac{-33}{2} <- -16.5
x_1 = 5 <- 5
f(x)=x^2 <- x^2
x^2 <- f(x) = x^2
y=2x+3 <- 2x+3
AB=12+12\sqrt{3} <- 12+12\sqrt{3}
30^\circ <- \angle ABC = 30^\circ
5 <- \text{Area} = 5 \text{ cm}^2
\theta = \frac{\pi}{3} <- \frac{\pi}{3}
x \in [-2,7] <- [-2,7]
(x,y)=(3,4) <- (3,4)
x=1, x=2 <- 1, 2
x=3, y=4 <- (3,4)
AB=9, CD=4 <- AB = 9 and CD = 4
x=5 </- 6
x=5 </- y=5
x=5 </- x=6
x \in [-2,7] </- [-2,7)
x=1, y=2 </- x=2, y=1
# an equation is its curve, not one of its sides
y=2x+3 <- y = 3+2x
y=2x+3 <- 2x-y+3=0
x+y=5 <- x=5-y
y=3 <- 3=y
x^2-4=0 <- x^2=4
2x + z - 5 = 0 <- 4x + 2z = 10
\frac{x^2}{16} - \frac{y^2}{9} = 1 <- 9x^2-16y^2=144
y=2x+3 </- y=2x-3
y=2x+3 </- y=3x+2
x^2+y^2=13 </- 13
x^2+y^2=13 </- x^2+y^2=14
x^2=4 </- x=2
18 </- 2x = 18
1=2 </- 3=5
2x + z - 5 = 0 </- 2x + z + 5 = 0
# inequalities
x \ge 5 <- 5 \le x
(2,\infty) <- x>2
[2,5) <- 2 \le x < 5
(-\infty,3) <- -\infty<x<3
(-\infty,3)\cup(3,\infty) <- x \neq 3
(-\infty,2)\cup(5,\infty) <- x<2 or x>5
x \le 5 </- x \ge 5
x \le 5 </- x \le 6
x \le 5 </- x < 5
x \le 5 </- 5
s^2 \le 8r^2 </- s^2 < 8r^2
(2,\infty) </- x \ge 2
# a tuple has an order, an interval its brackets
(3,4) <- (3, 4)
(3,4) <- \left( 3, 4 \right)
(3,4) <- 3,4
(3,4) <- (\frac{6}{2}, 4.0)
(3,4) <- \langle 3,4 \rangle
(1,2,3) <- [1,2,3]
[0,1) <- [0, 1.0)
(-\infty, 3) <- (-∞, 3)
(3,4) </- (4,3)
(3,4) </- 4,3
(3,4) </- [3,4]
(3,4) </- (3,4,5)
(3,4) </- (3,)
(3,4) </- 3
(3,4) </- 7
(3,4) </- \frac{3}{4}
(-1,1,1) </- (-1,1,1]
[0,1) </- [0,1]
[0,1) </- (0,1)
[0,1) </- (0,1]
[0,1) </- 0,1
(2,\infty) </- [2,\infty)
(2,\infty) </- (2,\infty]
# unions
(-\infty,3)\cup(3,\infty) <- (3,\infty)\cup(-\infty,3)
(-\infty,3)\cup(3,\infty) <- (-∞,3)∪(3,∞)
(-\infty,3)\cup(3,\infty) <- \mathbb{R} \setminus \{3\}
(-\infty,\infty) <- \mathbb{R}
(-\infty,3)\cup(3,\infty) </- (-\infty,\infty)
(-\infty,3)\cup(3,\infty) </- (-\infty,3)
(-\infty,3)\cup(3,\infty) </- (-\infty,3]\cup(3,\infty)
(0,9) \cup (9,36) </- (0,36)
# lists of solutions and sets have no order
1,2 <- 2,1
1,2 <- 1 and 2
1,2 <- 2 or 1
1,2 <- \{1,2\}
\{1,2\} <- \{2,1\}
\{1,2\} <- 1, 2
1,2 <- x = 1 or x = 2
12\text{ and }13 <- 12, 13
2, 3, \text{ and } 4 <- 4,3,2
6, 8\text{, and }10 <- 6,8,10
(-4, 27);(2, 15) <- (2,15), (-4,27)
\{5\} <- 5
1,3,3 <- 3,1,3
1,2 </- 1
1,2 </- 1,2,3
1,2 </- 1,3
1,2 </- 1,1
1,2 </- 12
1,3,3 </- 1,3
\{1,2\} </- (2,1)
# plus or minus
1 \pm \sqrt{19} <- 1+\sqrt{19},1-\sqrt{19}
\pm 3 <- 3, -3
\pm 3 <- -3 and 3
\{1\pm\sqrt{5},-2\} <- -2, 1+\sqrt5, 1-\sqrt5
1 \pm \sqrt{19} </- 1+\sqrt{19}
1 \pm \sqrt{19} </- 1 \pm \sqrt{17}
\pm 3 </- 3
# matrices, entry by entry
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <- \begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <- (1,2)
\begin{pmatrix} 1/2 & 0 \\ 0 & 1 \end{pmatrix} <- \begin{pmatrix} \frac12 & 0 \\ 0 & 1 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <- \left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <- [[1,2],[3,4]]
\begin{pmatrix} 1 \\ 2 \end{pmatrix} </- \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} </- \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} </- \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} </- (1,2,3,4)
# ratios and times are read as written
1:2 <- 1 : 2
1:2 </- 2:1
1:2 </- \frac12
1.5:2 </- 15:2
12:30 </- 12:03
05\!:\!00 <- 5:00
4:30 </- 4:03
# surds and constants
\frac{2}{\sqrt{3}} <- \frac{2\sqrt{3}}{3}
\frac{\sqrt{2}}{2} <- \frac{1}{\sqrt{2}}
\sqrt{12} <- 2\sqrt{3}
\sqrt[3]{16} <- 2\sqrt[3]{2}
-3 \sqrt{5} - 5 <- -5-3\sqrt5
5(\sqrt{3}-1) <- 5\sqrt3-5
0.5\pi <- \frac{\pi}{2}
2^{10} <- 1024
4! <- 24
\log_2 8 <- 3
\binom{5}{2} <- 10
\frac{1}{2004!} <- 1/2004!
\sqrt{2} </- \sqrt{3}
\sqrt[3]{2} </- \sqrt{2}
7 \pi </- 7
\log_2 8 </- \log_8 2
# the imaginary unit
3 + 2i <- 2i + 3
-668i <- - 668 i
-1 <- i^2
\frac{1}{i} <- -i
3+2i </- 3-2i
3+2i </- 3+2j
# polynomials and functions, in any order or form
x^2+1 <- 1+x^2
(x+1)(x+2) <- x^2+3x+2
x^2+3x+2 <- (x+2)(x+1)
-1-7z <- -(7z+1)
\frac{x+2}{7} <- \frac{1}{7}(x+2)
\frac{x+2}{7} <- (x+2)/7
\frac{1}{x}+\frac{1}{y} <- \frac{x+y}{xy}
3^x - 2^x <- -2^x+3^x
2xy <- 2yx
8x^9-125y^6 <- -125y^6+8x^9
2 \sec x <- \frac{2}{\cos x}
\tan x <- \frac{\sin x}{\cos x}
\cos^2\alpha <- 1-\sin^2\alpha
x^2+1 </- x^2-1
(x+1)(x+2) </- (x-1)(x-2)
x+1 </- y+1
x+1 </- x
2^x </- x^2
ab </- a+b
2 \sec x </- 2 \cos x
\sqrt{x^2} </- x
f(x) </- f(y)
x_1 </- x_2
n! </- n
# a number in a base is its digits and its base
204_5 <- 204_{5}
204_5 <- 204_{(5)}
204_5 <- 204 (base 5)
24_{10} <- 24
\text{A5}_{11} <- A5_{11}
0.0011_{2} <- 0.0011_2
204_5 </- 204_6
2\cdot 204_5 </- 2\cdot 204_6
204_5 </- 204
204_5 </- 54
204_5 </- 402_5
204_5 </- 204_{10}
24_{10} </- 24_{5}
# code, towers and undefined values equal nothing
18 </- __import__('os').system('true')
18 </- lambda: 18
18 </- int('18')
18 </- 9**9**9**9
18 </- ((20!)!)!
18 </- (10^8)!
18 </- \infty
18 </- \frac{0}{0}
\frac{0}{0} </- \frac{1}{0}
1 </- True
0 </- False
18 </- 18'
18 </- 18\ldots
18 </- 18)(
18 </- .*
18 </- %s
"""


def read_table() -> list[tuple[str, str, bool, str]]:
    """(gold, answer, expected, reason) of each line."""
    cases, reason = [], ""
    for line in TABLE.strip("\n").split("\n"):
        if line.startswith("# "):
            reason = line[2:]
            continue
        sign = " </- " if " </- " in line else " <- "
        gold, answer = line.split(sign, 1)
        cases.append((gold, answer, sign == " <- ", reason))
    return cases


CASES = read_table()


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 300


@pytest.mark.parametrize(("gold", "answer", "expected", "reason"), CASES, ids=[f"{c[0]} <- {c[1]}" for c in CASES])
def test_verdict(gold: str, answer: str, expected: bool, reason: str) -> None:
    assert is_correct(answer, gold) is expected, reason
    assert is_correct(gold, answer) is expected, f"{reason} (the other way round)"


def test_no_answer_is_wrong() -> None:
    assert not is_correct(None, "18")
    assert not is_correct("", "18")
    assert not is_correct("", "")
    assert not is_correct(" \n", " ")


def test_an_answer_longer_than_the_cap_is_none() -> None:
    assert is_correct(" " * 2000 + "18" + "\n" * 2000, "18")
    assert not is_correct("0" * answers.MAX_LENGTH + "18", "18")
    assert normalise("9" * (answers.MAX_LENGTH + 1)) == ""


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("<answer>18</answer>", "18", "the plain case"),
        ("<answer>\n 18 \n</answer>", "18", "white space is stripped"),
        ("18", None, "no tags"),
        ("<answer>18", None, "never closed"),
        ("18</answer>", None, "never opened"),
        ("<answer></answer>", None, "empty"),
        ("<answer> \n</answer>", None, "blank"),
        ("<answer>18</answer> <answer>20", "18", "the last complete block counts"),
        ("<answer>18</answer><answer>18.0</answer>", "18.0", "blocks that agree"),
        ("<answer>18</answer><answer>20</answer>", None, "blocks that disagree"),
        ("<answer>20</answer><answer>18</answer>", None, "in either order"),
        ("<answer>18</answer><answer></answer>", None, "an empty block disagrees"),
        ("<answer>18</answer>" * 3 + "<answer>20</answer>", None, "one of many disagrees"),
        ("write it in <answer> tags: <answer>18</answer>", "18", "a block starts at the last opening tag"),
        ("<answer>18</answer></answer>", "18", "a stray closing tag"),
        ("</answer><answer>18</answer>", "18", "a stray closing tag in front"),
        ("<reasoning><answer>18</answer></reasoning>", "18", "whatever the reasoning tags do"),
        ("<ANSWER>18</ANSWER>", None, "the tags are lower case"),
    ],
)
def test_extract_answer(text: str, expected: str | None, reason: str) -> None:
    assert extract_answer(text) == expected, reason


def test_extraction_of_many_tags_is_linear() -> None:
    assert extract_answer("<answer>" * 200_000) is None
    assert extract_answer("</answer>" * 200_000) is None
    assert extract_answer("<answer>1</answer>" * 50_000) == "1"


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,\sqrt{2}\right\}}$", r"\left\{1,\sqrt{2}\right\}"),
        (r"$\boxed 2$", "2"),
        (r"$\boxed {17}$", "17"),
        (r"\fbox{18}", "18"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{18", None),
        (r"\boxed", None),
        ("18", None),
    ],
)
def test_last_boxed(solution: str, gold: str | None) -> None:
    assert last_boxed(solution) == gold


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("6*3=<<6*3=18>>18\n#### 18", "18"),
        ("#### 57,500", "57500"),
        ("#### 1\n#### -2", "-2"),
        ("####  7 ", "7"),
        ("18", None),
        ("#### ", None),
    ],
)
def test_gsm8k_gold(text: str, gold: str | None) -> None:
    assert gsm8k_gold(text) == gold


# ---- hostile text ---------------------------------------------------------------------------------------

HOSTILE = [
    "(" * 1000,
    "(" * 400 + "1" + ")" * 400,
    "{" * 100_000,
    "\\frac{" * 160,
    "\\sqrt{" * 120 + "}" * 120,
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "x^{x^{x^{x}}}",
    "((20!)!)!",
    "(10^8)!",
    "100000000!",
    "(9999!)^{9999}",
    "10^{99999999}",
    "(x+y+z)^{300}",
    "\\binom{99999999}{5000}",
    "\\sum_{k=1}^{1000000000} k^k",
    "__import__('os').system('touch PWNED')",
    "exec(\"open('PWNED','w')\")",
    "\\write18{touch PWNED}",
    "\\input{/etc/passwd}",
    "\x00" * 50,
    "18\x0018",
    "\U0001f600" * 900,
    "ﷺ" * 900,
    "a\u0301" * 400,
    "9" * 1_000_000,
    "1+" * 500_000,
    "," * 1000,
    "\\pm1" * 200,
    "=" * 1000,
    "1=" * 400 + "1",
    "~ " * 500,
    "|x|" * 200,
    "\\cup" * 200,
    "&\\\\" * 200,
    "\\frac{0}{0}",
    "\\infty" * 100,
    "nan",
    "1e999",
    "\\boxed{" * 100,
    "$" * 999,
    "the answer is " * 70,
]


def test_hostile_text_is_wrong_bounded_and_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "TIME_LIMIT", 1.0)  # the bound is the code's own; a shorter one keeps the test short
    answers._decide.cache_clear()
    for text in HOSTILE:
        for gold in ("18", r"\sqrt{2}", "x^2+1", "(3,4)", r"\text{even}"):
            assert not is_correct(text, gold), text[:60]
        assert not equivalent(text, text + "+1"), text[:60]
        extract_answer(f"<answer>{text}</answer>")
        last_boxed(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9}}", "x^{x^{x^{x}}}", "2^{100000}", "(2^{5000})^{5000}", "(x+y)^{300}"),
        *("((20!)!)!", "(10^8)!", "100000!", "\\binom{100000}{5}"),
        *("9" * 400 + "x", "x@y", "__x__", "|x|" * 9, "18 19", "204_5+x", "x+\\ldots", "[0,\\infty]"),
    ],
)
def test_what_is_no_answer_never_reaches_sympy(text: str) -> None:
    before = answers.worker_calls()
    for gold in ("x+1", r"\sin x", r"[0,1)\cup[2,3]"):
        assert not is_correct(text, gold)
    assert answers.worker_calls() == before


def test_a_late_comparison_is_wrong_counted_and_the_next_one_right(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = "\\sin(" * 20 + "x" + ")" * 20  # each level doubles the grammar's work
    monkeypatch.setattr(answers, "TIME_LIMIT", 0.2)
    answers._decide.cache_clear()
    before = answers.timeouts()
    assert not is_correct(nested, nested.replace("x", "x+x-x"))
    assert answers.timeouts() == before + 1
    monkeypatch.undo()
    assert is_correct("2x+x^2", "x(x+2)")
    assert answers.timeouts() == before + 1


def test_a_time_limit_covers_all_elements_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []

    def slow(a: str, b: str, tolerance: Fraction | None, limit: float) -> tuple[bool, float]:
        spent.append(limit)
        return True, 2.0

    monkeypatch.setattr(answers._worker, "ask", slow)
    answers._decide.cache_clear()
    assert is_correct("(1+x,2+x,3+x)", "(x+1,x+2,x+3)")
    assert spent == [5.0, 3.0, 1.0]
    answers._decide.cache_clear()


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.text(alphabet="0123456789+-/^{}()[]\\,.=% xyfracsqtpi", max_size=25))
def test_any_text_gets_a_symmetric_verdict(a: str, b: str) -> None:
    for first, second in ((a, b), (a, "18"), (b, "18"), (f"<answer>{b}</answer>", b)):
        assert equivalent(first, second) == equivalent(second, first)
    assert equivalent(a, a) == bool(normalise(a))
    extract_answer(a)
    last_boxed(a)
    gsm8k_gold(a)


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=200), st.fractions(max_denominator=200))
def test_fractions_are_compared_exactly(x: Fraction, y: Fraction) -> None:
    spelled = rf"\frac{{{x.numerator}}}{{{x.denominator}}}"
    assert is_correct(spelled, str(y)) == (x == y)
    assert is_correct(f"${spelled}$", str(x))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms())
def test_lists_ignore_the_order_and_tuples_do_not(values: list[int], rng: random.Random) -> None:
    shuffled = rng.sample(values, len(values))
    listed, relisted = (", ".join(map(str, items)) for items in (values, shuffled))
    assert is_correct(relisted, listed)
    assert is_correct(f"({relisted})", f"({listed})") == (values == shuffled)


# ---- the worker process ---------------------------------------------------------------------------------


def test_verdicts_are_the_same_in_other_threads() -> None:
    sample = CASES[::7]
    answers._decide.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda case: is_correct(case[1], case[0]), sample))
    assert verdicts == [case[2] for case in sample]


def test_an_outer_alarm_survives() -> None:
    fired = threading.Event()
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        answers._decide.cache_clear()
        assert is_correct("x+x^2", "x(x+1)")
        assert fired.wait(10) or signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert fired.is_set()


def test_a_dead_worker_is_replaced() -> None:
    assert is_correct("x+x^3", "x(x^2+1)")
    process = answers._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert is_correct("x+x^4", "x(x^3+1)")


def test_a_forked_child_gets_its_own_worker() -> None:
    assert is_correct("x+x^5", "x(x^4+1)")
    process = answers._worker._process
    lock = answers._worker._lock
    lock.acquire()  # as another thread may hold it at the moment of the fork
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for the parent's lock dies of it
        code = 1
        try:
            code = 0 if is_correct("x+x^6", "x(x^5+1)") and answers._worker._process is not process else 1
            answers._worker.stop()
        finally:
            os._exit(code)
    lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert answers._worker._process is process and is_correct("x+x^7", "x(x^6+1)")


def test_the_worker_ends_with_its_parent() -> None:
    code = "import answers, os; answers.is_correct('x+x^2', 'x(1+x)'); print(answers._worker._process.pid, flush=True);"
    for ending in ("", "os._exit(1)", "os.kill(os.getpid(), 9)"):
        run = subprocess.run([sys.executable, "-c", code + ending], capture_output=True, text=True, cwd=ROOT)
        pid = int(run.stdout)
        for _ in range(200):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"the worker outlives its parent ({ending or 'normal exit'})")


def test_the_judge_imports_no_heavy_package_and_no_namesake() -> None:
    code = (
        "import sys, answers, rewards, metrics\n"
        "assert answers.is_correct('x+x^2', 'x(1+x)')\n"
        "heavy = {'torch', 'transformers', 'trl', 'sympy', 'math_verify', 'evaluate'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "answer_worker.py"
    broken.write_text("import os; os.write(0, b'No module named math_verify\\n')")
    monkeypatch.setattr(answers, "_WORKER_FILE", broken)
    monkeypatch.setattr(answers, "_worker", answers._Worker())
    with pytest.raises(RuntimeError, match=r"No module named math_verify.*requirements-cpu\.txt"):
        is_correct("x+x^8", "x(x^7+1)")


# ---- the real files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golds(data_dir: Path) -> dict[str, list[str | None]]:
    """The gold of each row of each file."""
    read = {
        "gsm8k_train.jsonl": lambda row: gsm8k_gold(row["answer"]),
        "gsm8k_test.jsonl": lambda row: gsm8k_gold(row["answer"]),
        "math_train.jsonl.gz": lambda row: last_boxed(row["solution"]),
        "math_test.jsonl": lambda row: last_boxed(row["solution"]),
        "math500_test.jsonl": lambda row: row["answer"],
        "aime2024.jsonl": lambda row: row["answer"],
        "aime2025.jsonl": lambda row: str(row["answer"]),
        "amc2023.jsonl": lambda row: row["answer"],
    }
    found = {}
    for name, gold_of in read.items():
        path = data_dir / name
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            found[name] = [gold_of(json.loads(line)) for line in lines]
    return found


def test_every_gold_is_read(golds: dict[str, list[str | None]]) -> None:
    missing = {name: sum(gold is None for gold in values) for name, values in golds.items()}
    assert missing == dict.fromkeys(missing, 0) | {"math_train.jsonl.gz": 2}  # two empty boxes
    assert [len(values) for values in golds.values()] == [7473, 1319, 7500, 5000, 500, 30, 30, 40]


def test_every_gold_equals_itself_without_sympy(golds: dict[str, list[str | None]]) -> None:
    before = answers.worker_calls()
    for values in golds.values():
        assert [gold for gold in values if gold and not is_correct(gold, gold)] == []
        assert [gold for gold in values if gold and not is_correct(rf"The answer is $\boxed{{{gold}}}$.", gold)] == []
    assert answers.worker_calls() == before


def test_wrong_golds_are_wrong_and_nine_in_ten_never_reach_sympy(golds: dict[str, list[str | None]]) -> None:
    rng = random.Random(0)
    values = [gold for gold in golds["math_train.jsonl.gz"] + golds["math_test.jsonl"] if gold]
    pairs = [(rng.choice(values), rng.choice(values)) for _ in range(1500)]
    before = answers.worker_calls()
    for a, b in pairs:
        if is_correct(a, b):  # the same number, or two spellings of it
            digits = ["".join(filter(str.isalnum, normalise(text).split("=")[-1])) for text in (a, b)]
            assert digits[0].startswith(digits[1]) or digits[1].startswith(digits[0]), (a, b)
    assert answers.worker_calls() - before <= len(pairs) // 10


def test_a_worker_killed_by_someone_else_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = answers._Worker()
    assert worker.ask("x+1", "1+x", None, 5.0)[0]  # it runs
    connect = worker._connect
    kills = []

    def connect_then_kill() -> socket.socket:
        connection = connect()
        if not kills and worker._process is not None:  # between the connection and the reply, once
            worker._process.kill()
            worker._process.wait()
            kills.append(worker._process.pid)
        return connection

    monkeypatch.setattr(worker, "_connect", connect_then_kill)
    assert worker.ask("x+2", "2+x", None, 5.0)[0]
    assert (len(kills), worker.given_up, worker.calls) == (1, 0, 2)
    worker.stop()


ISOLATED = """
import os, socket, sys
sys.path[:0] = [ROOT, *PATHS]
import answer_worker
answer_worker.isolate()
acts = {
    "write": lambda: open("new", "w").write("text"),
    "append": lambda: open("there", "a").write("text"),
    "connect": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5),
    "send": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 53)),
}
for name, act in acts.items():
    try:
        act()
    except OSError:
        continue
    print(name, "was allowed")
assert open("there").read() == "kept"
assert answer_worker.same(r"\\\\sqrt{8}", r"2\\\\sqrt{2}", None)
print("still compares")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_worker_has_no_network_and_writes_no_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as listening:  # it would answer
        port = listening.getsockname()[1]
        values = f"ROOT, PATHS, PORT = {str(Path(answers.__file__).parent)!r}, {sys.path!r}, {port}\n"
        done = subprocess.run(
            [sys.executable, "-I", "-c", values + ISOLATED], cwd=tmp_path, capture_output=True, text=True
        )
    assert done.stdout.splitlines() == ["still compares"], done.stderr
    assert (tmp_path / "there").read_text() == "kept"
